from __future__ import annotations

import pytest

from mooncake_v0.metadata.check import check_segments
from mooncake_v0.metadata.liveness import ALIVE, STALE, Liveness
from mooncake_v0.metadata.segments import group_segments
from mooncake_v0.metadata.store import Entry
from tests.unit.metadata.builders import entry_of, ram, record, rpc_meta

A, B = "10.0.0.7:13003", "10.0.0.8:13103"
HEALTHY = [ram(A), rpc_meta(A), ram(B), rpc_meta(B)]


def rules(entries: list[Entry], status: str = ALIVE) -> list[str]:
    segments = group_segments(entries)
    verdicts = {s.name: Liveness(status, "because") for s in segments}
    return [finding.rule for finding in check_segments(segments, verdicts)]


def test_a_healthy_pair_has_no_findings() -> None:
    assert rules(HEALTHY) == []


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([ram(A), rpc_meta(A, port=15432)], ["metadata-address-differs"]),
        ([ram(A), rpc_meta(A, host="192.0.2.1")], ["metadata-address-differs"]),
        ([ram("127.0.0.1:1"), rpc_meta("127.0.0.1:1")], ["metadata-loopback-published"]),
        ([ram(A, protocol="rdma", devices=[]), rpc_meta(A)], ["metadata-devices-empty"]),
        ([ram(A, buffers=[]), rpc_meta(A)], ["metadata-no-buffers"]),
        ([ram(A, buffers=[{"addr": 1, "length": 0}]), rpc_meta(A)], ["metadata-empty-buffer"]),
        ([ram(A)], ["metadata-half-published"]),
        ([rpc_meta(A)], ["metadata-half-published"]),
        ([Entry(f"mooncake/ram/{A}", b"x"), rpc_meta(A)], ["metadata-corrupt-value"]),
        ([*HEALTHY[:2], ram(B, protocol="rdma", devices=[{}]), rpc_meta(B)], ["metadata-mixed-protocols"]),
        ([entry_of(record(A, deployment="x")), entry_of(record(B, deployment="y"))], ["metadata-several-deployments"]),
        ([entry_of(record(A)), entry_of(record(B))], ["metadata-rank-twice"]),
    ],
)
def test_each_fault_has_its_finding(entries: list[Entry], expected: list[str]) -> None:
    assert rules(entries) == expected


def test_a_dead_segment_gets_one_finding_only() -> None:
    assert rules([ram(A, buffers=[])], STALE) == ["metadata-stale-segment"]
