"""Moving KV entries between two agents, and between an agent and its worker.

`agent` is the process that owns the engine; `agent_client` is the worker's end of it. Everything else here is a part of
those two: `pool` (shared memory), `lookup_buffer` (entries and their states), `engine` (the border to the pinned
engine), `side_channel` and `messages` (the small talk next to the bulk transfer).
"""
