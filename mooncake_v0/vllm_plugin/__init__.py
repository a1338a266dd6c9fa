"""The plugin into vLLM 0.6.4.post1: the only part that imports vLLM.

`autoload` is called by torch and by vLLM and registers hooks; `engine_args` adds --kv-transfer-config; `worker_hooks`
turns a worker with that configuration into a producer or a consumer.
"""
