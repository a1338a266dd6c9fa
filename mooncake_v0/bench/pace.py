"""Whether running answers keep their token pace while long prompts keep arriving: part of `mooncake-v0 bench serve`.

A few streams decode alone, then again while one client sends one long prompt after the other. On a plain instance each
prompt's prefill stalls the streams; on a pair only what decode does to take the prompt's KV.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Callable

from mooncake_v0.bench.arrivals import Arrivals
from mooncake_v0.bench.client import Client, Prompt, complete
from mooncake_v0.bench.serve_report import Percentiles, percentiles

STREAMS = 4
STREAM_PROMPT_TOKENS = 128

MakePrompt = Callable[[int, int], Prompt]  # prompt tokens, output tokens → one that no cache knows


@dataclass(frozen=True)
class PaceSide:
    """ITL of the streams in ms. prompts: long ones that were answered meanwhile; ratio_p99: of p99, arrivals over alone."""

    alone: Percentiles
    arrivals: Percentiles
    prompts: int
    ratio_p99: float


@dataclass(frozen=True)
class Pace:
    """prompt_tokens: of the arriving ones; output_tokens: of each stream."""

    prompt_tokens: int
    streams: int
    output_tokens: int
    proxy: PaceSide
    plain: PaceSide


async def measure_side(client: Client, make_prompt: MakePrompt, arrivals: Arrivals, output_tokens: int) -> PaceSide:
    """Both phases on one side. Raises CouldNotCheckError if an answer fails."""
    alone = await _streams(client, make_prompt, output_tokens)
    ended = asyncio.Event()
    arriving = asyncio.create_task(arrivals.until(ended))
    try:
        beside = await _streams(client, make_prompt, output_tokens)
    finally:
        ended.set()
        prompts = await arriving
    one, other = percentiles(alone), percentiles(beside)
    return PaceSide(one, other, prompts, round(other.p99 / one.p99, 3) if one.p99 else 0.0)


async def _streams(client: Client, make_prompt: MakePrompt, output_tokens: int) -> list[float]:
    """All gaps of all streams, ms."""
    prompts = [make_prompt(STREAM_PROMPT_TOKENS, output_tokens) for _ in range(STREAMS)]
    answers = await asyncio.gather(*(client.ask(prompt) for prompt in prompts))
    return [gap_s * 1000 for answer in answers for gap_s in complete(answer, client).gaps_s]
