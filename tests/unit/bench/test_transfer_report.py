from __future__ import annotations

import json

from mooncake_v0.bench.shapes import SHAPES
from mooncake_v0.bench.transfer_report import Samples, make_report


def make_samples(**changes: object) -> Samples:
    values: dict[str, object] = {
        "engine_s": [0.5, 1.0, 4.0],
        "copy_s": [0.1, 0.1, 0.1],
        "transfer_s": [1.0, 1.0, 8.0],
        "cache_s": [2.0, 2.0, 16.0],
        "upstream_s": [10.0],
        **changes,
    }
    return Samples(1024, 2_000_000_000, "engine", **values)  # type: ignore[arg-type]


def test_a_report_has_exactly_the_published_keys() -> None:
    report = json.loads(json.dumps(make_report(SHAPES["tiny"], [make_samples()], {}, []).as_dict()))

    assert list(report["limits"]) == ["engine_gb_per_s", "memcpy_gb_per_s"]
    assert list(report["rows"][0]) == [
        "prompt_tokens",
        "kv_bytes",
        "transport",
        "transfer_ms",
        "gb_per_s",
        "share_of_engine",
        "share_of_memcpy",
        "vs_upstream",
    ]


def test_shares_are_medians_of_the_rounds_own_ratios() -> None:
    row = make_report(SHAPES["tiny"], [make_samples()], {}, []).rows[0]

    assert row.share_of_engine == 0.5  # of 0.5, 1.0 and 0.5, although the middle times are equal
    assert (row.transfer_ms, row.gb_per_s) == (1000.0, 2.0)
    assert (row.share_of_memcpy, row.vs_upstream) == (0.1, 10.0)


def test_cache_to_cache_has_its_own_rows() -> None:
    row = make_report(SHAPES["tiny"], [make_samples()], {}, []).cache_to_cache[0]

    assert (row.transfer_ms, row.share_of_engine, row.vs_upstream) == (2000.0, 0.25, 5.0)


def test_without_upstream_the_comparison_is_null() -> None:
    report = make_report(SHAPES["tiny"], [make_samples(upstream_s=[])], {}, [])

    assert report.rows[0].vs_upstream is None
    assert report.limit_rows[0]["upstream_ms"] is None


def test_the_limits_are_the_best_of_all_sizes() -> None:
    samples = [make_samples(), make_samples(engine_s=[0.25, 0.25, 0.25], copy_s=[1.0, 1.0, 1.0])]

    limits = make_report(SHAPES["tiny"], samples, {}, []).limits

    assert (limits.engine_gb_per_s, limits.memcpy_gb_per_s) == (8.0, 20.0)
