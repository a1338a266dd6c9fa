"""The sweeps of `mooncake-v0 bench serve`: the same prompts to a pair, through its proxy, and to one plain instance.

Prompt-length sweep: one request at a time, each prompt to both sides in turn, first one and then the other side first.
Rate sweep: Poisson arrivals, the same ones for both sides, in two halves with the sides in turn. Prompts are random and
never repeat, neither in a run nor between runs, so that no cache on either side can know them.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Sequence

from mooncake_v0.bench.arrivals import Arrivals, random_ids
from mooncake_v0.bench.client import Answer, Client, Prompt, complete
from mooncake_v0.bench.pace import STREAM_PROMPT_TOKENS, STREAMS, Pace, measure_side
from mooncake_v0.bench.serve_report import SweepPoint, sweep_point
from mooncake_v0.errors import CouldNotCheckError

DEFAULT_PROMPT_TOKENS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DEFAULT_RATES = (0.5, 1.0, 2.0)
_WARM_UP_REQUESTS = 2

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ServeOptions:
    """prompt_tokens None: the default lengths, as far as the model takes them. rates: requests a second, may be empty.

    pace_prompt_tokens: of the prompts that arrive while others decode; None leaves that out
    """

    proxy_url: str
    plain_url: str
    prompt_tokens: Sequence[int] | None
    output_tokens: int
    requests: int
    rates: Sequence[float]
    rate_prompt_tokens: int
    rate_requests: int
    seed: int
    timeout_s: float = 300.0
    api_key: str | None = None
    pace_prompt_tokens: int | None = None
    pace_output_tokens: int = 512


@dataclass(frozen=True)
class Sweeps:
    prompt_sweep: tuple[SweepPoint, ...]
    rate_sweep: tuple[SweepPoint, ...]
    pace: Pace | None
    run: dict[str, Any]
    notes: tuple[str, ...]


async def measure(options: ServeOptions, progress: Progress) -> Sweeps:
    """Run both sweeps. Raises CouldNotCheckError if a side cannot be measured at all."""
    arguments: dict[str, Any] = {"timeout_s": options.timeout_s, "key": options.api_key}
    async with Client(options.proxy_url, **arguments) as proxy, Client(options.plain_url, **arguments) as plain:
        lengths, notes = _lengths(options, proxy, plain)
        bench = ServeBench(options, proxy, plain, progress, len(lengths))
        prompt_sweep = [await bench.measure_length(tokens) for tokens in lengths]
        rate_sweep = [await bench.measure_rate(rate) for rate in options.rates]
        pace = await bench.measure_pace() if options.pace_prompt_tokens else None
        progress("done", bench.steps, bench.steps)
        run = {
            "model": plain.model,
            "seed": options.seed,
            "output_tokens": options.output_tokens,
            "requests": options.requests,
            "rate_requests": options.rate_requests,
            "cpus": len(os.sched_getaffinity(0)),
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
    return Sweeps(tuple(prompt_sweep), tuple(rate_sweep), pace, run, tuple(notes))


class ServeBench:
    """Asks both sides the same; `measure_length` and `measure_rate` give one point each, `measure_pace` another figure."""

    def __init__(self, options: ServeOptions, proxy: Client, plain: Client, progress: Progress, lengths: int) -> None:
        self.steps = lengths * options.requests + len(options.rates) * 4 + 2 * bool(options.pace_prompt_tokens)
        self._options = options
        self._sides = (proxy, plain)
        self._random = random.Random(options.seed)
        self._progress = progress
        self._done = 0

    async def measure_length(self, tokens: int) -> SweepPoint:
        """One request at a time; throughput is that of one client."""
        await self._warm_up(tokens)
        answers: tuple[list[Answer], list[Answer]] = ([], [])
        for number in range(self._options.requests):
            self._step(f"{tokens} tokens: request {number + 1} of {self._options.requests}")
            prompt = self._prompt(tokens)
            for side in (0, 1) if number % 2 else (1, 0):
                answers[side].append(complete(await self._sides[side].ask(prompt), self._sides[side]))
        busy_s = [sum(answer.ended_s - answer.started_s for answer in one) for one in answers]
        return self._point(tokens, None, answers, busy_s)

    async def measure_rate(self, rate: float) -> SweepPoint:
        """Requests at random times; an answer that fails is counted, not fatal: overload may be what is measured."""
        options = self._options
        answers: tuple[list[Answer], list[Answer]] = ([], [])
        wall_s = [0.0, 0.0]
        halves = (options.rate_requests // 2, options.rate_requests - options.rate_requests // 2)
        for half, count in enumerate(halves):
            prompts = [self._prompt(options.rate_prompt_tokens) for _ in range(count)]
            arrivals_s = self._arrivals(rate, count)
            for side in (0, 1) if half else (1, 0):
                self._step(f"{rate:g} requests/s at {('the pair', 'plain')[side]}, half {half + 1} of 2")
                found = await _ask_at(self._sides[side], prompts, arrivals_s)
                answers[side].extend(found)
                if found:
                    wall_s[side] += max(answer.ended_s for answer in found) - min(answer.started_s for answer in found)
        return self._point(options.rate_prompt_tokens, rate, answers, wall_s)

    async def measure_pace(self) -> Pace:
        """ITL of a few streams, alone and while long prompts arrive."""
        tokens, output_tokens = self._options.pace_prompt_tokens or 0, self._options.pace_output_tokens
        sides = []
        with tempfile.TemporaryDirectory(prefix="mooncake-v0-bench-") as folder:
            for side, name in zip(self._sides, ("the pair", "plain")):
                self._step(f"streams beside prompts of {tokens} tokens at {name}")
                await self._warm_up(tokens)
                with Arrivals.start(
                    Path(folder),
                    url=side.url,
                    key=self._options.api_key,
                    timeout_s=self._options.timeout_s,
                    tokens=tokens,
                    seed=self._random.getrandbits(64),
                ) as arrivals:
                    sides.append(await measure_side(side, self._prompt, arrivals, output_tokens))
        return Pace(tokens, STREAMS, output_tokens, *sides)

    def _point(
        self, tokens: int, rate: float | None, answers: tuple[list[Answer], list[Answer]], wall_s: Sequence[float]
    ) -> SweepPoint:
        return sweep_point(
            tokens,
            self._options.output_tokens,
            rate,
            proxy=answers[0],
            plain=answers[1],
            proxy_wall_s=wall_s[0],
            plain_wall_s=wall_s[1],
        )

    async def _warm_up(self, tokens: int) -> None:
        for _ in range(_WARM_UP_REQUESTS):
            prompt = self._prompt(tokens)
            for side in self._sides:
                complete(await side.ask(prompt), side)

    def _prompt(self, tokens: int, output_tokens: int | None = None) -> Prompt:
        return Prompt(random_ids(self._random, tokens), output_tokens or self._options.output_tokens)

    def _arrivals(self, rate: float, count: int) -> list[float]:
        """Seconds from the start; the first request comes at once."""
        arrivals_s = [0.0]
        while len(arrivals_s) < count:
            arrivals_s.append(arrivals_s[-1] + self._random.expovariate(rate))
        return arrivals_s[:count]

    def _step(self, text: str) -> None:
        self._progress(text, self._done, self.steps)
        self._done += 1


async def _ask_at(client: Client, prompts: Sequence[Prompt], arrivals_s: Sequence[float]) -> list[Answer]:
    async def one(prompt: Prompt, arrival_s: float) -> Answer:
        await asyncio.sleep(arrival_s)
        return await client.ask(prompt)

    return list(await asyncio.gather(*(one(*pair) for pair in zip(prompts, arrivals_s))))


def _lengths(options: ServeOptions, proxy: Client, plain: Client) -> tuple[list[int], list[str]]:
    """The prompt lengths that both sides take; asked-for ones must be among them."""
    if proxy.model != plain.model:
        raise CouldNotCheckError(
            f"the pair serves {proxy.model!r} and the plain instance {plain.model!r}",
            fix="serve the same model under the same name on both",
        )
    limit = min((side.max_tokens for side in (proxy, plain) if side.max_tokens), default=None)
    wanted = options.prompt_tokens or DEFAULT_PROMPT_TOKENS
    room = None if limit is None else limit - options.output_tokens
    fitting = [tokens for tokens in wanted if room is None or tokens <= room]
    missing = [tokens for tokens in wanted if tokens not in fitting]
    if options.rates and room is not None and options.rate_prompt_tokens > room:
        missing_rate = f"--rate-prompt-tokens {options.rate_prompt_tokens} and {options.output_tokens} output tokens"
        raise CouldNotCheckError(f"{missing_rate} are over the model's limit of {limit}", fix="ask for less")
    if options.pace_prompt_tokens and limit is not None:
        _check_pace(options.pace_prompt_tokens, options.pace_output_tokens, limit)
    if missing and (options.prompt_tokens or not fitting):
        raise CouldNotCheckError(
            f"prompts of {', '.join(map(str, missing))} tokens and {options.output_tokens} output tokens are over the "
            f"model's limit of {limit}",
            fix="ask for shorter prompts, or start the servers with a larger --max-model-len",
        )
    notes = [f"left out: {', '.join(map(str, missing))} tokens, over the model's limit of {limit}"] if missing else []
    return fitting, notes


def _check_pace(prompt_tokens: int, output_tokens: int, limit: int) -> None:
    for name, tokens in (
        (f"--pace-prompt-tokens {prompt_tokens} and 2 output tokens", prompt_tokens + 2),
        (
            f"--pace-output-tokens {output_tokens} and {STREAM_PROMPT_TOKENS} of a prompt",
            output_tokens + STREAM_PROMPT_TOKENS,
        ),
    ):
        if tokens > limit:
            raise CouldNotCheckError(f"{name} are over the model's limit of {limit}", fix="ask for less")
