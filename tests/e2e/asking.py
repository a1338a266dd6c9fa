"""Requests to instances and proxies, and what is compared of their answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
import urllib.request
from typing import Any, Sequence

import aiohttp

from mooncake_v0.pin.processes import Pair

TIMEOUT_S = 120


def ask(url: str, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        decoded: dict[str, Any] = json.load(answer)
        return decoded


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> list[dict[str, Any]]:
    """All bodies by so many concurrent clients; answers in order."""
    limit = asyncio.Semaphore(clients)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            async with limit, session.post(f"{url}/v1/completions", json=body) as answer:
                decoded: dict[str, Any] = await answer.json()
                assert answer.status == 200, decoded
                return decoded

        return list(await asyncio.gather(*(one(body) for body in bodies)))


async def stream_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The concatenated text of each body's stream, all at once."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:

        async def one(body: dict[str, Any]) -> str:
            parts = []
            async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        parts.append(json.loads(line[6:])["choices"][0]["text"])
            return "".join(parts)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


class Near(float):
    """A number that equals those which differ in rounding only.

    What a sum in float32 is rounded to depends on the batch, on the threads and on where in memory its terms lie. One wrong
    number of an entry changes more than that: tests/e2e/test_pair_equality.py changes one.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (float, int)) and math.isclose(self, other, rel_tol=1e-4, abs_tol=1e-4)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = float.__hash__


def nearly(value: Any) -> Any:
    """Decoded JSON with each fraction as a Near."""
    if isinstance(value, dict):
        return {name: nearly(one) for name, one in value.items()}
    if isinstance(value, list):
        return [nearly(one) for one in value]
    return Near(value) if isinstance(value, float) else value


def exact_content(answer: dict[str, Any]) -> list[Any]:
    """Everything of an answer that must be equal: texts, tokens, logprobs, reasons and usage."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [*([choice["text"], choice["finish_reason"], choice["logprobs"]] for choice in choices), answer["usage"]]


def content(answer: dict[str, Any]) -> list[Any]:
    """As `exact_content`, and equal up to rounding."""
    return list(nearly(exact_content(answer)))


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def token_prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other seed gives; without the special tokens."""
    return random.Random(f"{length}-{seed}").choices(range(3, 512), k=length)


def counters(pair: Pair, role: str = "decode") -> dict[str, float]:
    return pair.agent_status("prefill" if role == "prefill" else "decode").counters


def hits(values: dict[str, float]) -> float:
    return values.get("hits", 0.0)


def misses(values: dict[str, float]) -> float:
    return sum(value for name, value in values.items() if name.startswith("miss_"))
