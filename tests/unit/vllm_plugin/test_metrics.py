"""The agents' reports on vLLM's /metrics page."""

from __future__ import annotations

import functools

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncake_v0.transfer.messages import Status
from mooncake_v0.vllm_plugin import metrics
from mooncake_v0.vllm_plugin.metrics import WorkerMetrics


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    registry = CollectorRegistry()
    for kind in (Counter, Gauge, Histogram):
        monkeypatch.setattr(metrics, kind.__name__, functools.partial(kind, registry=registry))
    return registry


def report(epoch: str, peer: str = "theirs", **counters: float) -> Status:
    return Status("decode", 0, epoch, "ready", peer, peer, 300, 1000, 2, counters, in_flight=1)


def test_state_of_the_agent_is_shown_as_it_is(registry: CollectorRegistry) -> None:
    worker = WorkerMetrics()

    worker.observe(report("a"))

    names = ("peer_up", "buffer_bytes", "buffer_limit_bytes", "buffer_entries", "transfers_in_flight")
    assert [registry.get_sample_value(f"mooncake_v0_{name}") for name in names] == [1, 300, 1000, 2, 1]
    worker.observe(report("a", peer=""))
    assert registry.get_sample_value("mooncake_v0_peer_up") == 0


def test_counters_go_on_over_the_end_of_an_agent(registry: CollectorRegistry) -> None:
    worker = WorkerMetrics()
    worker.observe(report("a", read_bytes=100.0, evicted=1.0))
    worker.observe(report("a", read_bytes=150.0, evicted=1.0, read_us=2e6))

    worker.observe(None)
    assert registry.get_sample_value("mooncake_v0_peer_up") == 0
    worker.observe(report("b", read_bytes=30.0, evicted=4.0, expired=1.0))

    assert registry.get_sample_value("mooncake_v0_read_bytes_total") == 180
    assert registry.get_sample_value("mooncake_v0_read_seconds_total") == 2
    assert registry.get_sample_value("mooncake_v0_entries_left_total", {"reason": "evicted"}) == 5
    assert registry.get_sample_value("mooncake_v0_entries_left_total", {"reason": "expired"}) == 1
    assert registry.get_sample_value("mooncake_v0_agent_ends_total") == 1


def test_time_of_each_batch_is_in_a_histogram(registry: CollectorRegistry) -> None:
    worker = WorkerMetrics()

    for seconds in (0.0004, 0.03, 9.0):
        worker.count("receive_seconds", seconds)

    counts = [
        registry.get_sample_value("mooncake_v0_receive_seconds_bucket", {"le": le}) for le in ("0.0005", "0.05", "2.0")
    ]
    assert counts == [1, 2, 2]
    assert registry.get_sample_value("mooncake_v0_receive_seconds_count") == 3
