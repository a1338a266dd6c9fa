"""From the seconds of the rounds to the rows of a report. Pure functions of the samples."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Sequence

from mooncake_v0.bench.shapes import KVShape


@dataclass
class Samples:
    """Seconds of each round for one prompt length; upstream_s may have fewer rounds, or none."""

    prompt_tokens: int
    kv_bytes: int
    transport: str
    engine_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    cache_s: list[float] = field(default_factory=list)
    upstream_s: list[float] = field(default_factory=list)
    upstream_failed: bool = False


@dataclass(frozen=True)
class Limits:
    """The best rate of any length: one read by the raw engine, one contiguous copy from pool to paged cache."""

    engine_gb_per_s: float
    memcpy_gb_per_s: float


@dataclass(frozen=True)
class Row:
    """One prompt length. Shares compare with the limits at the same size, not with the best of all sizes."""

    prompt_tokens: int
    kv_bytes: int
    transport: str
    transfer_ms: float
    gb_per_s: float
    share_of_engine: float
    share_of_memcpy: float
    vs_upstream: float | None


@dataclass(frozen=True)
class Report:
    """rows: the transfer alone; cache_to_cache: gather and scatter included, under the same names."""

    limits: Limits
    rows: tuple[Row, ...]
    cache_to_cache: tuple[Row, ...]
    limit_rows: tuple[dict[str, Any], ...]
    run: dict[str, object]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_report(shape: KVShape, samples: Sequence[Samples], run: dict[str, object], notes: Sequence[str]) -> Report:
    limit_rows = tuple(_limit_row(one) for one in samples)
    return Report(
        limits=Limits(
            engine_gb_per_s=max(row["engine_gb_per_s"] for row in limit_rows),
            memcpy_gb_per_s=max(row["memcpy_gb_per_s"] for row in limit_rows),
        ),
        rows=tuple(_row(one, one.transfer_s) for one in samples),
        cache_to_cache=tuple(_row(one, one.cache_s) for one in samples),
        limit_rows=limit_rows,
        run=run,
        notes=tuple(notes),
    )


def _row(samples: Samples, seconds: Sequence[float]) -> Row:
    middle_s = statistics.median(seconds)
    return Row(
        prompt_tokens=samples.prompt_tokens,
        kv_bytes=samples.kv_bytes,
        transport=samples.transport,
        transfer_ms=round(middle_s * 1000, 3),
        gb_per_s=_rate(samples.kv_bytes, middle_s),
        share_of_engine=_median_ratio(samples.engine_s, seconds),
        share_of_memcpy=_median_ratio(samples.copy_s, seconds),
        vs_upstream=_median_ratio(samples.upstream_s, seconds) if samples.upstream_s else None,
    )


def _limit_row(samples: Samples) -> dict[str, Any]:
    upstream_ms = statistics.median(samples.upstream_s) * 1000 if samples.upstream_s else None
    return {
        "prompt_tokens": samples.prompt_tokens,
        "kv_bytes": samples.kv_bytes,
        "engine_gb_per_s": _rate(samples.kv_bytes, statistics.median(samples.engine_s)),
        "memcpy_gb_per_s": _rate(samples.kv_bytes, statistics.median(samples.copy_s)),
        "upstream_ms": None if upstream_ms is None else round(upstream_ms, 3),
    }


def _rate(nbytes: int, seconds: float) -> float:
    """GB/s, where a GB is 10^9 bytes."""
    return round(nbytes / seconds / 1e9, 3)


def _median_ratio(theirs_s: Sequence[float], ours_s: Sequence[float]) -> float:
    """How many times faster than theirs: the median of the rounds' own ratios."""
    return round(statistics.median(theirs / ours for theirs, ours in zip(theirs_s, ours_s)), 3)
