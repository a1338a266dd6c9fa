"""The client that keeps sending prompts while others are timed: its real child process, and a server of the test's own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from mooncake_v0.bench.arrivals import Arrivals
from mooncake_v0.errors import CouldNotCheckError
from tests.proxy.backend import Backend, Behaviour, Received, answer, events, vllm_error

USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
TOKENS = 20


def use(url: str, folder: Path, do: Callable[[Arrivals], Any], seed: int = 1, every_s: float = 0.0) -> Any:
    with Arrivals.start(
        folder, url=url, key=None, timeout_s=20.0, tokens=TOKENS, seed=seed, every_s=every_s
    ) as arrivals:
        return do(arrivals)


async def serving(behaviour: Behaviour, *calls: Callable[[str], Any]) -> list[Received]:
    """The requests that came in while these were made one after the other."""
    backend = await Backend(behaviour).start()
    try:
        for call in calls:
            await asyncio.to_thread(call, backend.url)
        return backend.received
    finally:
        await backend.stop()


async def test_the_same_seed_makes_the_same_prompts(tmp_path: Path) -> None:
    def twice(arrivals: Arrivals) -> None:
        arrivals.send()
        arrivals.send()

    seeds = (1, 1, 2)
    calls = [lambda url, seed=seed: use(url, tmp_path, twice, seed) for seed in seeds]  # type: ignore[misc]
    received = await serving(events(2, ending=USAGE), *calls)
    one, again, other = ([request.json["prompt"] for request in received[at : at + 2]] for at in (0, 2, 4))
    assert one == again != other
    assert all(isinstance(prompt, list) and len(prompt) == TOKENS for prompt in one) and one[0] != one[1]


async def test_prompts_follow_each_other_until_the_end_and_not_too_soon(tmp_path: Path) -> None:
    came_s: list[float] = []
    stream = events(2, ending=USAGE)

    async def behave(received: Received, *connection: Any) -> None:
        came_s.append(time.monotonic())
        await stream(received, *connection)

    async def until_three(arrivals: Arrivals) -> int:
        ended = asyncio.Event()
        answered = asyncio.create_task(arrivals.until(ended))
        while len(came_s) < 3:
            await asyncio.sleep(0.01)
        ended.set()
        return await asyncio.wait_for(answered, 20.0)

    def check(url: str) -> None:
        answered = use(url, tmp_path, lambda arrivals: asyncio.run(until_three(arrivals)), every_s=0.5)
        assert answered in (2, 3)  # the third one's answer and the end may come in either order

    await serving(behave, check)
    assert len(came_s) == 3 and min(after - before for before, after in zip(came_s, came_s[1:])) > 0.25


async def test_an_answer_that_fails_is_told(tmp_path: Path) -> None:
    def check(url: str) -> None:
        with pytest.raises(CouldNotCheckError, match="status 500"):
            use(url, tmp_path, Arrivals.send)

    await serving(answer(500, vllm_error(500)), check)
