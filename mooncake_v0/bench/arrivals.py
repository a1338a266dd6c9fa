"""A client in a process of its own whose prompts keep arriving while `pace` times other answers.

In the process that times them, making a prompt of 16,384 token ids and sending it would take the timing 7 ms, more than a
token takes an 8B model. ``python -m mooncake_v0.bench.arrivals FD`` is the child; see `child`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Iterator

from mooncake_v0.bench.child import Child, Parent
from mooncake_v0.bench.client import Client, Prompt, complete

FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 499  # in every vocabulary, and none of the special tokens at its start
_OUTPUT_TOKENS = 2
_START_S = 30.0
_REST_S = 10.0  # for the child's answer, beyond the request's own time


def random_ids(source: random.Random, tokens: int) -> list[int]:
    return source.choices(range(FIRST_TOKEN_ID, LAST_TOKEN_ID + 1), k=tokens)


class Arrivals:
    """One prompt after the other, at least every_s apart; made by `start`. The same seed makes the same prompts."""

    def __init__(self, child: Child, timeout_s: float, every_s: float) -> None:
        self._child = child
        self._timeout_s = timeout_s
        self._every_s = every_s

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        folder: Path,
        *,
        url: str,
        key: str | None,
        timeout_s: float,
        tokens: int,
        seed: int,
        every_s: float = 0.0,
    ) -> Iterator[Arrivals]:
        """tokens: of each prompt; folder: gets the child's log. Raises CouldNotCheckError."""
        child = Child("arrivals", [sys.executable, "-m", __name__], folder / "arrivals.log", {})
        try:
            child.ask("open", _START_S, url=url, key=key, limit_s=timeout_s, tokens=tokens, seed=seed)
            yield cls(child, timeout_s, every_s)
        finally:
            child.kill()

    async def until(self, ended: asyncio.Event) -> int:
        """How many prompts were answered before. Raises CouldNotCheckError if one fails."""
        answered = 0
        while not ended.is_set():
            next_s = time.monotonic() + self._every_s
            await asyncio.to_thread(self.send)
            answered += not ended.is_set()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, next_s - time.monotonic()))
        return answered

    def send(self) -> None:
        """The next prompt; returns with its answer. Raises CouldNotCheckError if it fails."""
        self._child.ask("send", self._timeout_s + _REST_S)


class Sender:
    """In the child."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def open(self, url: str, key: str | None, limit_s: float, tokens: int, seed: int) -> None:
        self._random, self._tokens = random.Random(seed), tokens
        self._client = Client(url, timeout_s=limit_s, key=key)
        self._loop.run_until_complete(self._client.__aenter__())
        self._make_prompt()

    def send(self) -> None:
        """Returns with the answer, and with the next prompt at hand."""
        complete(self._loop.run_until_complete(self._client.ask(self._prompt)), self._client)
        self._make_prompt()

    def _make_prompt(self) -> None:
        self._prompt = Prompt(random_ids(self._random, self._tokens), _OUTPUT_TOKENS)


if __name__ == "__main__":
    sender = Sender()
    Parent(int(sys.argv[1])).serve({"open": sender.open, "send": sender.send})
