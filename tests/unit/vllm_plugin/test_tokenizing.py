"""Lists of token ids reach the tokenizer as they are, and prompts are tokenized beside the server's event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import types
from typing import Any, Callable

import numpy as np
import pytest
import torch
from transformers import tokenization_utils_base
from transformers.utils import generic

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.tiny_model import make_tiny_model
from mooncake_v0.vllm_plugin import tokenizing
from mooncake_v0.vllm_plugin.tokenizing import pass_token_lists


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization_utils_base, "to_py_obj", generic.to_py_obj)
    pass_token_lists()
    pass_token_lists()


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1, 2, 3],
        (1, 2),
        [[1, 2], [3]],
        7,
        None,
        [1, "two", 3.0],
        [np.int64(4), 5],
        [True, 1],
        torch.tensor([[1, 2]]),
        [torch.tensor(3), 4],
        np.array([5, 6]),
        {"input_ids": [1], "mask": torch.tensor([1])},
    ],
    ids=repr,
)
def test_result_is_that_of_transformers(value: Any) -> None:
    ours, theirs = tokenization_utils_base.to_py_obj(value), generic.to_py_obj(value)

    assert ours == theirs
    assert repr(ours) == repr(theirs)


def test_no_id_of_a_prompt_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(generic, "_get_frameworks_and_test_func", lambda value: asked.append(value) or {})
    ids = list(range(1000))

    copy = tokenization_utils_base.to_py_obj(ids)

    assert copy == ids and copy is not ids and not asked


# --- the server -------------------------------------------------------------------------------------------------------


class Tokenizer:
    """A real one that can be told to wait until the event loop has done something."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.loop_goes_on: threading.Event | None = None
        self.decoded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return self._real(*args, **kwargs)

    def decode(self, token_ids: Any) -> Any:
        self._wait()
        self.decoded.append(len(token_ids))
        return self._real.decode(token_ids)

    def _wait(self) -> None:
        if self.loop_goes_on is not None:
            assert self.loop_goes_on.wait(20), "the event loop stood still"


class EngineClient:
    """Refuses every request with the token ids that it was given; that refusal is the server's answer."""

    errored = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def get_tokenizer(self, lora_request: Any = None) -> Tokenizer:
        return self.tokenizer

    async def is_tracing_enabled(self) -> bool:
        return False

    def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(json.dumps(prompt["prompt_token_ids"]))


Serving = tuple[Any, Any, Any, Tokenizer]  # of completions, of chats, of /tokenize


@pytest.fixture
def make_serving(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Serving]:
    from vllm.config import ModelConfig
    from vllm.entrypoints.openai import serving_chat, serving_completion, serving_engine, serving_tokenization
    from vllm.transformers_utils.tokenizer import get_tokenizer

    completion, chat = serving_completion.OpenAIServingCompletion, serving_chat.OpenAIServingChat
    tokenization = serving_tokenization.OpenAIServingTokenization
    tiny_model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    for owner, name in (
        (serving_engine.OpenAIServing, "_normalize_prompt_tokens_to_input"),
        (serving_engine.OpenAIServing, "_preprocess_completion"),
        (serving_engine.OpenAIServing, "_preprocess_chat"),
        (completion, "create_completion"),
        (tokenization, "create_tokenize"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone after the test
    config = ModelConfig(tiny_model, "auto", tiny_model, tokenizer_mode="auto", trust_remote_code=False,
                         dtype="float32", seed=0, max_model_len=2048)  # fmt: skip
    paths = [serving_engine.BaseModelPath("tiny", tiny_model)]

    def make(*, patched: bool = True, request_logger: Any = None) -> Serving:
        if patched:
            tokenizing.patch_serving(serving_engine)
            tokenizing.patch_completions(serving_completion)
            tokenizing.patch_tokenization(serving_tokenization)
        tokenizer = Tokenizer(get_tokenizer(tiny_model))
        rest = {"lora_modules": None, "prompt_adapters": None, "request_logger": request_logger}
        client = EngineClient(tokenizer)
        return (
            completion(client, config, paths, **rest),
            chat(client, config, paths, "assistant", chat_template=None, **rest),
            tokenization(client, config, paths, lora_modules=None, request_logger=request_logger, chat_template=None),
            tokenizer,
        )

    return make


async def answer(serving: Serving, body: dict[str, Any]) -> str:
    """The server's words: the token ids that the engine would have got, or vLLM's refusal."""
    from vllm.entrypoints.openai import protocol

    completion, chat, tokenization, _ = serving
    raw = types.SimpleNamespace(headers={}, state=types.SimpleNamespace())
    if "only tokenize" in body:
        of_chat = "messages" in body["only tokenize"]
        kind = protocol.TokenizeChatRequest if of_chat else protocol.TokenizeCompletionRequest
        result = await tokenization.create_tokenize(kind(model="tiny", **body["only tokenize"]))
        return str(getattr(result, "tokens", result))
    if "messages" in body:
        result = await chat.create_chat_completion(protocol.ChatCompletionRequest(model="tiny", **body), raw)
    else:
        result = await completion.create_completion(protocol.CompletionRequest(model="tiny", **body), raw)
    return str(result.message)


BODIES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "one two three"},
    "token ids": {"prompt": [5, 6, 7]},
    "two texts": {"prompt": ["one", "two three"]},
    "truncated": {"prompt": "one two three four", "truncate_prompt_tokens": 2},
    "chat": {"messages": [{"role": "user", "content": "one two three"}]},
    "chat of parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]},
    "tokenize": {"only tokenize": {"prompt": "one two"}},
    "tokenize too much": {"only tokenize": {"prompt": "one " * 3000}},
    "tokenize a chat": {"only tokenize": {"messages": [{"role": "user", "content": "one two"}]}},
    "too long": {"prompt": "one " * 3000},
    "too long ids": {"prompt": [5] * 3000},
    "too long chat": {"messages": [{"role": "user", "content": "one " * 3000}]},
    "suffix": {"prompt": "one", "suffix": "two"},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
}


@pytest.mark.pin
@pytest.mark.parametrize("name", BODIES)
async def test_engine_gets_what_vllm_alone_would_give_it(make_serving: Callable[..., Serving], name: str) -> None:
    plain = await _answer_or_error(make_serving(patched=False), BODIES[name])

    assert await _answer_or_error(make_serving(), BODIES[name]) == plain


async def _answer_or_error(serving: Serving, body: dict[str, Any]) -> str:
    try:
        return await answer(serving, body)
    except Exception as error:  # whatever vLLM lets through to its server
        return repr(error)


@pytest.mark.pin
@pytest.mark.parametrize("name", ["text", "chat", "two texts", "tokenize", "tokenize a chat"])
async def test_other_answers_go_on_meanwhile(make_serving: Callable[..., Serving], name: str) -> None:
    serving = make_serving()
    plain = await answer(serving, BODIES[name])
    goes_on = serving[3].loop_goes_on = threading.Event()

    asking = asyncio.create_task(answer(serving, BODIES[name]))
    await asyncio.sleep(0.05)
    assert not asking.done()
    goes_on.set()

    assert await asking == plain


@pytest.mark.pin
async def test_text_of_token_ids_is_made_only_for_who_reads_it(make_serving: Callable[..., Serving]) -> None:
    from vllm.entrypoints.logger import RequestLogger

    silent, logging = make_serving(), make_serving(request_logger=RequestLogger(max_log_len=None))
    for serving in (silent, logging):
        assert await answer(serving, BODIES["token ids"]) == "[5, 6, 7]"
    assert (silent[3].decoded, logging[3].decoded) == ([], [3])

    await answer(silent, {**BODIES["token ids"], "echo": True})

    assert silent[3].decoded == [3]
