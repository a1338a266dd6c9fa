"""From answers to the figures of `mooncake-v0 bench serve`. Pure functions; percentiles by the nearest rank."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any, Sequence

from mooncake_v0.bench.client import Answer


@dataclass(frozen=True)
class Percentiles:
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class SideFigures:
    """One side of one point. itl_ms is over all gaps of all answers, tpot_ms over the answers' means.

    incomplete: streams from which the server lost tokens, see `Answer`.
    """

    requests: int
    failed: int
    incomplete: int
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles
    requests_per_s: float
    tokens_per_s: float
    first_error: str


@dataclass(frozen=True)
class Ratios:
    """Proxy over plain. Of latencies, below 1 is better; of throughput, above.

    ttft and tpot are medians of the ratios for the same prompt, itl_p50 and itl_p99 ratios of the percentiles.
    """

    ttft: float | None
    itl_p50: float | None
    itl_p99: float | None
    tpot: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class SweepPoint:
    """One prompt length or one rate. requests_per_s is the offered rate; None: one request after the other.

    equal_answers: of the compared ones, whose text on both sides has the same characters; their order is the stream's and
    not the model's alone, see `Answer`. Only complete answers are compared.
    """

    prompt_tokens: int
    output_tokens: int
    requests_per_s: float | None
    proxy: SideFigures
    plain: SideFigures
    ratio: Ratios
    equal_answers: int
    compared_answers: int


@dataclass(frozen=True)
class ServeReport:
    """transferred: decode's own counters over the run, where its agent was asked; None where it was not.

    pace: a `bench.pace.Pace`, None where that was not asked for
    """

    prompt_sweep: tuple[SweepPoint, ...]
    rate_sweep: tuple[SweepPoint, ...]
    pace: Any
    transferred: dict[str, float] | None
    run: dict[str, Any]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep_point(
    prompt_tokens: int,
    output_tokens: int,
    requests_per_s: float | None,
    *,
    proxy: Sequence[Answer],
    plain: Sequence[Answer],
    proxy_wall_s: float,
    plain_wall_s: float,
) -> SweepPoint:
    """proxy and plain hold the answers to the same prompts in the same order."""
    both = [(ours, theirs) for ours, theirs in zip(proxy, plain) if not ours.error and not theirs.error]
    complete = [(ours, theirs) for ours, theirs in both if not ours.lost_tokens and not theirs.lost_tokens]
    proxy_figures, plain_figures = _side(proxy, proxy_wall_s), _side(plain, plain_wall_s)
    return SweepPoint(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=requests_per_s,
        proxy=proxy_figures,
        plain=plain_figures,
        ratio=Ratios(
            ttft=_paired([(ours.ttft_s, theirs.ttft_s) for ours, theirs in both]),
            itl_p50=_ratio(proxy_figures.itl_ms.p50, plain_figures.itl_ms.p50),
            itl_p99=_ratio(proxy_figures.itl_ms.p99, plain_figures.itl_ms.p99),
            tpot=_paired([(ours.tpot_s, theirs.tpot_s) for ours, theirs in both]),
            tokens_per_s=_ratio(proxy_figures.tokens_per_s, plain_figures.tokens_per_s),
        ),
        equal_answers=sum(sorted(ours.text) == sorted(theirs.text) for ours, theirs in complete),
        compared_answers=len(complete),
    )


def _side(answers: Sequence[Answer], wall_s: float) -> SideFigures:
    good = [answer for answer in answers if not answer.error]
    return SideFigures(
        requests=len(answers),
        failed=len(answers) - len(good),
        incomplete=sum(answer.lost_tokens > 0 for answer in good),
        ttft_ms=percentiles([answer.ttft_s * 1000 for answer in good]),
        itl_ms=percentiles([gap * 1000 for answer in good for gap in answer.gaps_s]),
        tpot_ms=percentiles([answer.tpot_s * 1000 for answer in good if answer.tokens > 1]),
        requests_per_s=round(len(good) / wall_s, 4),
        tokens_per_s=round(sum(answer.tokens for answer in good) / wall_s, 3),
        first_error=next((answer.error for answer in answers if answer.error), ""),
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Zeros where there are no values."""
    if not values:
        return Percentiles(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    ranks = (ordered[max(0, math.ceil(len(ordered) * share) - 1)] for share in (0.5, 0.9, 0.99))
    return Percentiles(round(statistics.fmean(ordered), 3), *(round(value, 3) for value in ranks))


def _paired(pairs: Sequence[tuple[float, float]]) -> float | None:
    ratios = [ours / theirs for ours, theirs in pairs if theirs]
    return round(statistics.median(ratios), 3) if ratios else None


def _ratio(ours: float, theirs: float) -> float | None:
    return round(ours / theirs, 3) if theirs else None
