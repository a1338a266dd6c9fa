"""Keeps the server's work for long prompts away from the tokens that it writes meanwhile.

vLLM 0.6.4.post1 tokenizes a prompt in the server's event loop, and makes text of a prompt that came as token ids, although
only its log and an echo read that (entrypoints/openai/serving_engine.py). For as long as this takes, tens of milliseconds
for 16,384 tokens, no running answer gets a token. Here:

- a thread of its own does both; one, since tokenizers refuse to be used while another thread changes their truncation
- text that nobody will read is not made
- a list of whole numbers reaches the tokenizer as it is: transformers 4.46 asks of each number whether it is a tensor of
  one of five frameworks (utils/generic.py, to_py_obj), half a second for a hundred thousand of them
- a request's body is read faster than with Starlette's json

A chat with a multimodal model stays in the event loop, which fetches its images. Called only where a KV transfer is
configured.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Callable, Coroutine

from mooncake_v0.fast_json import loads
from mooncake_v0.vllm_plugin.wrapping import wrap_once

# what the thread made of prompts: the request, the future of the result
_tokenized: ContextVar[tuple[Any, asyncio.Future[Any]] | None] = ContextVar("mooncake_v0_tokenized", default=None)


def pass_token_lists() -> None:
    """Wrap the name under which tokenizers call to_py_obj; safe to call again."""
    from transformers import tokenization_utils_base

    wrap_once(tokenization_utils_base, "to_py_obj", _as_they_are)


def patch_serving(module: ModuleType) -> None:
    """Wrap three methods of OpenAIServing of entrypoints/openai/serving_engine.py."""
    wrap_once(module.OpenAIServing, "_normalize_prompt_tokens_to_input", _without_unread_text)
    wrap_once(module.OpenAIServing, "_preprocess_completion", _tokenized_before)
    wrap_once(module.OpenAIServing, "_preprocess_chat", _chat_in_thread)


def patch_completions(module: ModuleType) -> None:
    """Wrap OpenAIServingCompletion.create_completion of entrypoints/openai/serving_completion.py."""
    wrap_once(module.OpenAIServingCompletion, "create_completion", _tokenizing_first)


def patch_tokenization(module: ModuleType) -> None:
    """Wrap OpenAIServingTokenization.create_tokenize of entrypoints/openai/serving_tokenization.py: the proxy asks it."""
    wrap_once(module.OpenAIServingTokenization, "create_tokenize", _tokenizing_first)


def patch_requests(module: ModuleType) -> None:
    """Wrap Request.json of starlette/requests.py."""
    wrap_once(module.Request, "json", _read_fast)


def _read_fast(original: Callable[..., Any]) -> Callable[..., Any]:
    async def json(self: Any) -> Any:
        if not hasattr(self, "_json"):
            self._json = loads(await self.body())
        return self._json

    return json


def _as_they_are(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def to_py_obj(obj: Any) -> Any:
        if type(obj) is list and set(map(type, obj)) <= {int}:
            return obj.copy()
        return original(obj)

    return to_py_obj


class _NoText:
    """A tokenizer for prompts whose text nobody will read."""

    def decode(self, token_ids: Any) -> str:
        return ""


def _without_unread_text(original: Callable[..., Any]) -> Callable[..., Any]:
    def normalize(self: Any, request: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        is_read = self.request_logger is not None or getattr(request, "echo", False)
        return original(self, request, tokenizer if is_read else _NoText(), *args, **kwargs)

    return normalize


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tokenizer")


def _tokenizing_first(original: Callable[..., Any]) -> Callable[..., Any]:
    async def create(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        future = await _tokenize(self, request) if hasattr(request, "prompt") else None
        if future is None:
            return await original(self, request, *args, **kwargs)
        before = _tokenized.set((request, future))
        try:
            return await original(self, request, *args, **kwargs)
        finally:
            _tokenized.reset(before)

    return create


async def _tokenize(serving: Any, request: Any) -> asyncio.Future[Any] | None:
    """The future of a request's prompts, done. None: vLLM is to look at this request itself, and will refuse it."""
    if await serving._check_model(request) is not None or serving.engine_client.errored:
        return None
    lora, _ = serving._maybe_get_adapters(request)
    tokenizer = await serving.engine_client.get_tokenizer(lora)
    work = functools.partial(
        serving._preprocess_completion,
        request,
        tokenizer,
        request.prompt,
        truncate_prompt_tokens=getattr(request, "truncate_prompt_tokens", None),
        add_special_tokens=request.add_special_tokens,
    )
    future = asyncio.get_running_loop().run_in_executor(_thread(), work)
    await asyncio.wait([future])
    future.exception()  # seen, should vLLM refuse the request for something else
    return future


def _tokenized_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def preprocess(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = _tokenized.get()
        if found is not None and found[0] is request:
            return found[1].result()
        return original(self, request, *args, **kwargs)

    return preprocess


def _chat_in_thread(original: Callable[..., Any]) -> Callable[..., Any]:
    async def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model_config.multimodal_config is not None:
            return await original(self, *args, **kwargs)
        work = original(self, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(_thread(), _run_to_end, work)

    return preprocess


def _run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of one that waits for nothing: a chat without images."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("a chat of text waited for something")
