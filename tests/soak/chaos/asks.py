"""The soak's requests, made from its seed, and the answers that one plain instance gives to them."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import aiohttp

from tests.e2e.asking import ask_all, content

LONGEST_TOKENS = 3000
VOCABULARY = range(3, 512)  # of the tiny model, without its special tokens
MOST_ANSWER_TOKENS = 24
REFERENCE_CLIENTS = 4
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 0.7, "seed": 5, "n": 2},
)


@dataclass(frozen=True)
class Ask:
    """A request's body and, once known, what must come back: texts, reasons, logprobs, usage (asking.content)."""

    body: dict[str, Any]
    expected: list[Any]

    @property
    def may_stream(self) -> bool:
        """Streams of several samples are cut short by vLLM 0.6.4.post1 itself when the first sample ends before another
        (sequence.py:1393: only the first one's steps produce output, and its end ends the request)."""
        return "n" not in self.body


def make_bodies(model: str, label: str, count: int) -> list[dict[str, Any]]:
    """Prompts of 1 to 3,000 tokens (log-uniform: as many below 55 as above), of every kind; label is the seed."""
    numbers = random.Random(label)
    bodies = []
    for index in range(count):
        length = max(1, round(LONGEST_TOKENS ** numbers.random()))
        bodies.append(
            {
                "model": model,
                "prompt": numbers.choices(VOCABULARY, k=length),
                "max_tokens": numbers.randint(1, MOST_ANSWER_TOKENS),
                "logprobs": 1,
                **KINDS[index % len(KINDS)],
            }
        )
    return bodies


def fetch_reference(url: str, bodies: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """What the plain instance at `url` answers."""
    answers = asyncio.run(ask_all(url, bodies, clients=REFERENCE_CLIENTS))
    return [content(answer) for answer in answers]


def write_reference(path: Path, expected: Sequence[list[Any]]) -> None:
    """Whole or not at all: another process waits for it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(expected))
    new.rename(path)


def pair_up(bodies: Sequence[dict[str, Any]], path: Path) -> list[Ask]:
    return [Ask(body, expected) for body, expected in zip(bodies, json.loads(path.read_text()))]


class AskFailedError(Exception):
    """The answer was not a complete 200."""


async def ask_whole(session: aiohttp.ClientSession, url: str, ask: Ask) -> str:
    """Ask in one piece; returns how the answer differs from the expected one, or nothing."""
    async with session.post(f"{url}/v1/completions", json=ask.body) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise AskFailedError(f"{answer.status} {text[:200]}")
    got = content(json.loads(text))
    return "" if got == ask.expected else f"expected {ask.expected}, got {got}"


async def ask_streamed(session: aiohttp.ClientSession, url: str, ask: Ask) -> str:
    """Ask for a stream; compares the joined texts and the finish reasons."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    complete = False
    async with session.post(f"{url}/v1/completions", json={**ask.body, "stream": True}) as answer:
        if answer.status != 200:
            raise AskFailedError(f"{answer.status} {(await answer.text())[:200]}")
        async for line in answer.content:
            complete = complete or line.startswith(b"data: [DONE]")
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "choices" not in event:
                raise AskFailedError(f"event {line[:200]!r}")
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
    if not complete:
        raise AskFailedError("the stream ended before [DONE]")
    got = [[texts[index], reasons.get(index)] for index in sorted(texts)]
    expected = [choice[:2] for choice in ask.expected[:-1]]
    return "" if got == expected else f"expected {expected}, got {got}"
