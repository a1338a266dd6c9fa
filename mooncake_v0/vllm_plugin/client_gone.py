"""Mends one fault of the pin: an answer that is not streamed is generated to its end although its client has left.

vLLM 0.6.4.post1 asks once a second whether the client is still there (utils.py:410, merge_async_iterators). Behind its
request id middleware (entrypoints/openai/api_server.py:487) Starlette's `Request.is_disconnected` is always false: it looks
for a message that is there at once, and through that middleware none ever is. Here a task waits for the message. What a
proxy takes back, because prefill failed or its own client has left, then costs decode nothing more. Called only where a KV
transfer is configured.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import ModuleType
from typing import Any, Callable

from mooncake_v0.vllm_plugin.wrapping import wrap_once


def patch_completions(module: ModuleType) -> None:
    """Wrap OpenAIServingCompletion.create_completion of entrypoints/openai/serving_completion.py."""
    wrap_once(module.OpenAIServingCompletion, "create_completion", _noticing)


def patch_chat(module: ModuleType) -> None:
    """Wrap OpenAIServingChat.create_chat_completion of entrypoints/openai/serving_chat.py."""
    wrap_once(module.OpenAIServingChat, "create_chat_completion", _noticing)


def _noticing(original: Callable[..., Any]) -> Callable[..., Any]:
    async def create(self: Any, request: Any, raw_request: Any = None) -> Any:
        if raw_request is None or request.stream:  # the server itself sees that nobody reads a stream
            return await original(self, request, raw_request)
        gone = asyncio.ensure_future(_until_gone(raw_request))

        async def is_disconnected() -> bool:
            return gone.done()

        raw_request.is_disconnected = is_disconnected
        try:
            return await original(self, request, raw_request)
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gone

    return create


async def _until_gone(raw_request: Any) -> None:
    """The body has been read, so that all that can come is the end."""
    while (await raw_request.receive())["type"] != "http.disconnect":
        pass
