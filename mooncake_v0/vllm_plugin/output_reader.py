"""Mends one fault of the pin that would garble what a pair streams.

vLLM 0.6.4.post1's server tries `MQLLMEngineClient.setup` again every five seconds until the engine's process has loaded the
model (entrypoints/openai/api_server.py:205), and each try starts another task that reads the engine's outputs
(engine/multiprocessing/client.py:258). The readers then overtake each other and streamed tokens arrive swapped. Here a new
try ends the reader of the one before. Called only where a KV transfer is configured.
"""

from __future__ import annotations

from typing import Any, Callable

from mooncake_v0.vllm_plugin.wrapping import wrap_once


def patch_output_reader() -> None:
    """Wrap MQLLMEngineClient.setup; safe to call again."""
    from vllm.engine.multiprocessing.client import MQLLMEngineClient

    wrap_once(MQLLMEngineClient, "setup", _with_one_reader)


def _with_one_reader(original: Callable[..., Any]) -> Callable[..., Any]:
    async def setup(self: Any) -> None:
        if self.output_loop is not None:
            self.output_loop.cancel()
        await original(self)

    return setup
