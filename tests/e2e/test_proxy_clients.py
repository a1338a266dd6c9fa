"""Clients of the proxy in front of a real pair get what a plain instance of the pinned vLLM gives them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from typing import Any

import aiohttp
import openai
import pytest

from mooncake_v0.pin.processes import Pair
from tests.e2e.asking import nearly
from tests.proxy.command import running_command
from tests.proxy.corpus import corpus

pytestmark = pytest.mark.pin

BODIES = corpus()
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 1+1?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
END_OF_SEQUENCE = 2  # of the tiny model
VARYING = {"id", "created", "request_id"}


def stripped(value: Any) -> Any:
    """An answer without what differs between any two answers: names, times, and how fractions are rounded."""
    if isinstance(value, dict):
        return {key: stripped(one) for key, one in value.items() if key not in VARYING}
    return [stripped(one) for one in value] if isinstance(value, list) else nearly(value)


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str, dict[str, str]]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url + path, json=body) as response:
        return response.status, await response.text(), {k.lower(): v for k, v in response.headers.items()}


async def compared(plain_url: str, pair: Pair, model: str, name: str) -> tuple[int, str, int, str, str]:
    path, fields = BODIES[name]
    # every answer ends at once: without a limit a chat answer would fill the context
    body = {"logit_bias": {str(END_OF_SEQUENCE): 100}, **fields, "model": model}
    direct_status, direct_text, _ = await post(plain_url, path, body)
    status, text, headers = await post(pair.proxy_url, path, body)
    return direct_status, direct_text, status, text, headers.get("x-mooncake-disaggregated", "")


async def test_every_status_of_the_corpus_is_that_of_a_plain_instance(
    plain_url: str, pair: Pair, tiny_model: str
) -> None:
    """And a refusal is, word for word, the plain instance's own; prefill has not computed anything for it."""
    seen = {name: await compared(plain_url, pair, tiny_model, name) for name in BODIES}

    differing = {name: row for name, row in seen.items() if row[0] != row[2]}
    refused = {name: row for name, row in seen.items() if 400 <= row[0] < 500}
    assert differing == {}
    assert len(refused) >= 30
    assert {name: row for name, row in refused.items() if row[1] != row[3]} == {}
    assert {name: row for name, row in refused.items() if row[4] == "yes"} == {}


def of_both(plain_url: str, pair: Pair) -> list[openai.OpenAI]:
    urls = (plain_url, pair.proxy_url)
    return [openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) for url in urls]


COMPLETION_ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "two seeded sequences with log probabilities": {"n": 2, "seed": 3, "temperature": 0.8, "logprobs": 5},
    "best of three": {"best_of": 3, "n": 1, "seed": 3, "temperature": 0.8},
    "echo": {"echo": True, "temperature": 0},
    "list of prompts": {"prompt": ["one", "two", "three"], "temperature": 0},
    "token ids": {"prompt": [5, 6, 7, 8], "temperature": 0},
}
CHAT_ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "two seeded sequences": {"n": 2, "seed": 3},
    "log probabilities": {"logprobs": True, "top_logprobs": 3, "temperature": 0},
    "max_completion_tokens": {"max_completion_tokens": 6, "temperature": 0},
    "tools offered but not chosen": {"tools": [TOOL], "tool_choice": "none", "temperature": 0},
}


@pytest.mark.parametrize("ask", COMPLETION_ASKS.values(), ids=COMPLETION_ASKS)
def test_openai_client_completions(plain_url: str, pair: Pair, tiny_model: str, ask: dict[str, Any]) -> None:
    options = {"model": tiny_model, "prompt": "The capital of France", "max_tokens": 6, **ask}

    direct, proxied = (client.completions.create(**options).model_dump() for client in of_both(plain_url, pair))

    assert stripped(proxied) == stripped(direct)


@pytest.mark.parametrize("ask", CHAT_ASKS.values(), ids=CHAT_ASKS)
def test_openai_client_chat(plain_url: str, pair: Pair, tiny_model: str, ask: dict[str, Any]) -> None:
    options = {"model": tiny_model, "messages": MESSAGES, "max_tokens": 6, **ask}

    direct, proxied = (client.chat.completions.create(**options).model_dump() for client in of_both(plain_url, pair))

    assert stripped(proxied) == stripped(direct)


def test_openai_client_streams_with_usage(plain_url: str, pair: Pair, tiny_model: str) -> None:
    options: dict[str, Any] = {
        "model": tiny_model,
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }

    seen = []
    for client in of_both(plain_url, pair):
        completion = [stripped(one.model_dump()) for one in client.completions.create(prompt="hello", **options)]
        chat = [stripped(one.model_dump()) for one in client.chat.completions.create(messages=MESSAGES, **options)]
        seen.append((completion, chat))

    direct, proxied = seen
    assert proxied == direct
    assert proxied[0][-1]["usage"]["completion_tokens"] == 6


def test_openai_client_lists_the_models(pair: Pair, tiny_model: str) -> None:
    client = openai.OpenAI(base_url=pair.proxy_url + "/v1", api_key="none", max_retries=0)

    assert [model.id for model in client.models.list()] == [tiny_model]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_json_and_a_request_id(pair: Pair, tiny_model: str) -> None:
    body = json.dumps({"model": tiny_model, "prompt": "hi", "max_tokens": 2})
    command = ["curl", "-sS", "-i", "-m", "60", "-H", "content-type: application/json", "-H", "x-request-id: from-curl"]
    answer = subprocess.run(
        [*command, "-d", body, pair.proxy_url + "/v1/completions"], capture_output=True, text=True, check=True
    ).stdout

    head, _, text = answer.partition("\n\n")
    assert "HTTP/1.1 200" in head
    assert "content-type: application/json" in head
    assert "x-request-id: from-curl" in head
    assert "x-mooncake-disaggregated: yes" in head
    assert json.loads(text)["usage"]["completion_tokens"] == 2


async def test_real_pair_is_discovered_in_the_metadata_store(pair: Pair, tiny_model: str) -> None:
    arguments = ["--discover", pair.metadata_url, "--port", "0", "--access-log", "none", "--drain-delay", "0"]
    async with running_command(*arguments) as command:
        status = 503
        deadline = time.monotonic() + 60
        while status == 503 and time.monotonic() < deadline:
            body = {"model": tiny_model, "prompt": "found in the store", "max_tokens": 2}
            status, text, headers = await post(command.url, "/v1/completions", body)
            await asyncio.sleep(0.2)

    assert status == 200, text
    assert headers["x-mooncake-disaggregated"] == "yes"
