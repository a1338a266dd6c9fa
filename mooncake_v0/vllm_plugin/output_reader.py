"""Mends one fault of the pin that would garble what a pair streams.

vLLM 0.6.4.post1's server tries `MQLLMEngineClient.setup` again every five seconds until the engine's process has loaded the
model (entrypoints/openai/api_server.py:205), and each try starts another task that reads the engine's outputs
(engine/multiprocessing/client.py:258). The readers then overtake each other and streamed tokens arrive swapped. Here a new
try ends the reader of the one before. Called only where a KV transfer is configured.
"""

from __future__ import annotations

import functools
from typing import Any


def patch_output_reader() -> None:
    """Wrap MQLLMEngineClient.setup; safe to call again."""
    from vllm.engine.multiprocessing import client

    client_class: Any = client.MQLLMEngineClient
    if getattr(client_class, "_mooncake_v0_patched", False):
        return
    client_class._mooncake_v0_patched = True
    original = client_class.setup

    @functools.wraps(original)
    async def setup(self: Any) -> None:
        if self.output_loop is not None:
            self.output_loop.cancel()
        await original(self)

    client_class.setup = setup
