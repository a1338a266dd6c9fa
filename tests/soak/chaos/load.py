"""The clients: mixed load through the proxy in a thread of its own, and what became of every request."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Sequence

import aiohttp

from tests.soak.chaos.asks import Ask, AskFailedError, ask_streamed, ask_whole

DEADLINE_S = 180.0  # prefill's time-out at the proxy (60 s), a retry, and the answer on a busy machine
ABORTED_SHARE = 0.1
LONGEST_PATIENCE_S = 4.0  # of a client that leaves
PAUSE_AFTER_FAILURE_S = 2.0

EQUAL, WRONG, FAILED, ABORTED, LATE = "equal", "wrong", "failed", "aborted", "late"


@dataclass(frozen=True)
class Outcome:
    """One request that was not simply right. Times are monotonic seconds."""

    kind: str
    number: int
    started_s: float
    ended_s: float
    detail: str

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


class Load:
    """`clients` clients that ask in a closed loop between `start` and `stop`, spread over the urls."""

    def __init__(
        self, urls: Sequence[str], asks: Sequence[Ask], *, clients: int, seed: str, aborts: bool = True
    ) -> None:
        self._urls, self._asks, self._clients, self._seed = urls, asks, clients, seed
        self._aborted_share = ABORTED_SHARE if aborts else 0.0
        self.counts: Counter[str] = Counter()
        self.noteworthy: list[Outcome] = []
        self.seconds: list[float] = []
        self.in_flight: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def start(self) -> Load:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Returns when every request that is in flight has ended, at the latest at its deadline."""
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(self._client(session, index) for index in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession, index: int) -> None:
        numbers = random.Random(f"{self._seed}-{index}")
        while not self._stop.is_set():
            number = numbers.randrange(len(self._asks))
            patience_s = numbers.random() * LONGEST_PATIENCE_S if numbers.random() < self._aborted_share else 0.0
            self.in_flight[index] = time.monotonic()
            outcome = await self._ask(session, index, number, streamed=numbers.random() < 0.5, patience_s=patience_s)
            del self.in_flight[index]
            self._note(outcome)
            if outcome.kind == FAILED:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _ask(
        self, session: aiohttp.ClientSession, index: int, number: int, *, streamed: bool, patience_s: float
    ) -> Outcome:
        started_s = time.monotonic()
        ask = self._asks[number]
        answer = (ask_streamed if streamed and ask.may_stream else ask_whole)(
            session, self._urls[index % len(self._urls)], ask
        )
        try:
            detail = await asyncio.wait_for(answer, patience_s or DEADLINE_S)
            kind = WRONG if detail else EQUAL
        except asyncio.TimeoutError:
            kind, detail = (ABORTED, "") if patience_s else (LATE, f"no answer within {DEADLINE_S:.0f} s")
        except (AskFailedError, aiohttp.ClientError, OSError) as error:
            kind, detail = FAILED, f"{type(error).__name__} {error}"
        except (ValueError, LookupError) as error:  # a 200 that is not an answer
            kind, detail = WRONG, f"{type(error).__name__} {error}"
        return Outcome(kind, number, started_s, time.monotonic(), detail)

    def _note(self, outcome: Outcome) -> None:
        self.counts[outcome.kind] += 1
        if outcome.kind == EQUAL:
            self.seconds.append(outcome.seconds)
        elif outcome.kind != ABORTED:
            self.noteworthy.append(outcome)


async def ask_each_once(url: str, asks: Sequence[Ask], clients: int) -> list[str]:
    """Ask every one once, streamed and not in turns; returns what was wrong or failed."""
    limit = asyncio.Semaphore(clients)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(number: int, ask: Ask) -> str:
            async with limit:
                return await (ask_streamed if number % 2 and ask.may_stream else ask_whole)(session, url, ask)

        found = await asyncio.gather(*(one(*pair) for pair in enumerate(asks)), return_exceptions=True)
    return [f"{type(each).__name__} {each}" if isinstance(each, BaseException) else each for each in found if each]
