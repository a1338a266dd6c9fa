"""The request features of the pin's server, each as a body to send to a pair and to one plain instance.

`tests.e2e.test_engine_features` and `python -m tests.soak.equality` run them.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from mooncake_v0.pin.processes import Pair
from tests.e2e.asking import TIMEOUT_S, ask, counters, hits, nearly, token_prompt

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["ms", "s"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["unit", "count"],
}
STOP = [7, 11, 250]


@dataclass(frozen=True)
class Feature:
    """fields: added to a greedy request of 16 tokens; hits: prompts that decode must not compute, 0 = computed normally."""

    fields: dict[str, Any]
    hits: int = 1
    path: str = COMPLETIONS
    length: int = 50


def chat(*, hits: int = 1, text: str = "What travels between two instances?", **fields: Any) -> Feature:
    messages = [{"role": "system", "content": "Short answers."}, {"role": "user", "content": text}]
    return Feature({"messages": messages, **fields}, hits, CHAT)


SAMPLED = {"temperature": 0.9, "seed": 7}
FEATURES: dict[str, Feature] = {
    # several sequences of one prompt
    "n": Feature({**SAMPLED, "n": 3}, hits=3),
    "best_of": Feature({**SAMPLED, "n": 2, "best_of": 4}, hits=4),
    "several prompts": Feature({"prompt": [token_prompt(length, 401) for length in (9, 90, 33)]}, hits=3),
    "several texts": Feature({"prompt": ["one text", "another one, a little longer"]}, hits=2),
    "beam search": Feature({"use_beam_search": True, "n": 3, "max_tokens": 5}, hits=0),
    # guided decoding
    "guided choice, outlines": Feature({"guided_choice": ["prefill", "decode"], "guided_decoding_backend": "outlines"}),
    "guided regex, outlines": Feature({"guided_regex": "[0-9]{3}-[a-f]{2}", "guided_decoding_backend": "outlines"}),
    "guided json, outlines": Feature(
        {"guided_json": SCHEMA, "guided_decoding_backend": "outlines", "max_tokens": 48}, length=70
    ),
    "guided choice, lm-format-enforcer": Feature(
        {"guided_choice": ["prefill", "decode"], "guided_decoding_backend": "lm-format-enforcer"}
    ),
    "guided regex, lm-format-enforcer": Feature(
        {"guided_regex": "[0-9]{3}-[a-f]{2}", "guided_decoding_backend": "lm-format-enforcer"}
    ),
    "guided json, lm-format-enforcer": Feature(
        {"guided_json": SCHEMA, "guided_decoding_backend": "lm-format-enforcer", "max_tokens": 48}, length=70
    ),
    "response format": Feature({"response_format": {"type": "json_object"}, "max_tokens": 24}),
    # logit processors
    "logit bias": Feature({"logit_bias": {"17": 30, "400": -100, "31": 12.5}}),
    "allowed tokens": Feature({"allowed_token_ids": [40, 41, 42, 43, 44, 45]}),
    "banned tokens": Feature({"logit_bias": {str(token): -100 for token in range(3, 200)}}),
    # where an answer ends
    "min_tokens": Feature({"min_tokens": 12, "stop_token_ids": list(range(3, 400)), "max_tokens": 20}),
    "stop token ids": Feature({"stop_token_ids": list(range(3, 120))}),
    "stop strings": Feature({"stop": ["a", "e", "\u0120", "s"], "max_tokens": 40}),
    "stop strings in the answer": Feature({"stop": ["a", "e"], "include_stop_str_in_output": True, "max_tokens": 40}),
    "end of text": Feature({"logit_bias": {"2": 100}}),
    "ignore_eos": Feature({"logit_bias": {"2": 100}, "ignore_eos": True, "skip_special_tokens": False}),
    "one token": Feature({"max_tokens": 1}),
    # sampling
    "seed": Feature({**SAMPLED}),
    "top_k, top_p, min_p": Feature({**SAMPLED, "top_k": 40, "top_p": 0.9, "min_p": 0.01}),
    "repetition penalty": Feature({"repetition_penalty": 1.7, "max_tokens": 32}),
    "frequency penalty": Feature({"frequency_penalty": 1.9, "max_tokens": 32}),
    "presence penalty": Feature({"presence_penalty": -1.5, "max_tokens": 32}),
    "all penalties and a seed": Feature(
        {**SAMPLED, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    ),
    # what comes back
    "echo": Feature({"echo": True, "logprobs": None, "prompt": "a text that comes back"}),
    "echo with log probabilities": Feature({"echo": True, "prompt": "another text to come back"}, hits=0),
    "log probabilities of the prompt": Feature({"prompt_logprobs": 2}, hits=0),
    "no log probabilities": Feature({"logprobs": None}),
    "truncated prompt": Feature({"truncate_prompt_tokens": 20}),
    # chat
    "chat with log probabilities": chat(logprobs=True, top_logprobs=4),
    "chat, two choices": chat(text="Two.", n=2, hits=2, **SAMPLED),
    "chat, max_completion_tokens": chat(text="Count.", max_completion_tokens=5),
    "chat, json schema": chat(
        text="Give me JSON.",
        response_format={"type": "json_schema", "json_schema": {"name": "span", "schema": SCHEMA}},
        max_tokens=48,
    ),
    "chat, tool choice": chat(
        text="Use the tool.",
        tools=[{"type": "function", "function": {"name": "span", "parameters": SCHEMA}}],
        tool_choice={"type": "function", "function": {"name": "span"}},
        max_tokens=48,
    ),
    "chat, echo": chat(text="Again.", echo=True, hits=0),
}
# this vLLM's default for guided decoding
NEED_OUTLINES = (
    "guided choice, outlines",
    "guided regex, outlines",
    "guided json, outlines",
    "response format",
    "chat, tool choice",
)


def make_body(name: str, model: str) -> dict[str, Any]:
    """The request of one feature, with a prompt of its own."""
    feature = FEATURES[name]
    common: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 16}
    if feature.path == COMPLETIONS:
        number = list(FEATURES).index(name)
        common |= {"prompt": token_prompt(feature.length + number, 400), "logprobs": 3}
    return {**common, **feature.fields}


def comparable(answer: Any) -> Any:
    """An answer without what is new in each: ids and times."""
    if isinstance(answer, dict):
        return {name: comparable(value) for name, value in answer.items() if name not in ("id", "created")}
    return [comparable(value) for value in answer] if isinstance(answer, list) else nearly(answer)


async def stream(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The pieces of a streamed answer, in the order in which they came."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"data: [DONE]", lines[-3:]
    return [json.loads(line[6:]) for line in lines[:-1]]


def joined(pieces: list[dict[str, Any]]) -> tuple[dict[int, list[Any]], dict[str, Any]]:
    """Per choice: text, tokens with log probabilities, why it ended; and the usage, which the last piece has."""
    choices: dict[int, list[Any]] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            found = choices.setdefault(choice["index"], ["", [], None])
            found[0] += text_of(choice, "delta")
            found[1] += tokens_of(choice)
            found[2] = choice["finish_reason"] or found[2]
    return choices, counts(pieces[-1]["usage"])


def parts(answer: dict[str, Any]) -> tuple[dict[int, list[Any]], dict[str, Any]]:
    """The same of an answer in one piece."""
    choices = {
        choice["index"]: [text_of(choice, "message"), tokens_of(choice), choice["finish_reason"]]
        for choice in answer["choices"]
    }
    return choices, counts(answer["usage"])


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Without the details that only an answer in one piece has, empty."""
    return {name: value for name, value in usage.items() if value is not None}


def text_of(choice: dict[str, Any], message: str) -> str:
    if "text" in choice:
        return str(choice["text"])
    calls = choice[message].get("tool_calls") or ()
    return (choice[message].get("content") or "") + "".join(call["function"]["arguments"] for call in calls)


def tokens_of(choice: dict[str, Any]) -> list[Any]:
    found = choice.get("logprobs") or {}
    if found.get("content") is not None:  # chat
        return list(found["content"])
    return list(zip(found.get("tokens", ()), found.get("token_logprobs", ()), found.get("top_logprobs", ())))


def assert_same(name: str, plain_url: str, pair: Pair, model: str) -> None:
    """The pair's answer is the plain instance's, streamed too, and decode skipped as many prompts as it should.

    The plain instance is not asked to stream: without this package's mending the pin may swap streamed tokens.
    """
    feature, body = FEATURES[name], make_body(name, model)
    before = hits(counters(pair))

    answer, plain = (comparable(ask(url, body, feature.path)) for url in (pair.proxy_url, plain_url))
    streamed = asyncio.run(stream(pair.proxy_url, feature.path, body)) if can_stream(feature) else None

    skipped = hits(counters(pair)) - before
    assert answer == plain, f"{name}: {answer}, not {plain}"
    assert streamed is None or joined(streamed) == parts(answer), f"{name}, streamed"
    assert skipped == feature.hits * (1 if streamed is None else 2), f"{name}: decode skipped {skipped} prompts"


def can_stream(feature: Feature) -> bool:
    """What the pin refuses to stream or, with echo of a completion, fails to (an assertion in serving_completion.py)."""
    fields, unstreamed = feature.fields, ("best_of", "use_beam_search", "prompt_logprobs")
    return not any(name in fields for name in (*unstreamed, *(("echo",) if feature.path == COMPLETIONS else ())))
