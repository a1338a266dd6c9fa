"""The proxy's Prometheus metrics, in a registry of their own. Filled from each finished `Record` and, for the state of
pairs, read from the balancer at every scrape.

Every request is counted once in `requests_total`, and the histograms' counts are those of its lines in the access log.
"""

from __future__ import annotations

import time
from typing import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake_v0.proxy.balancer import Balancer
from mooncake_v0.proxy.record import Record

PREFIX = "mooncake_v0_proxy_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
STATES = ("starting", "up", "recovering", "ejected", "wedged", "silent", "down")


class Metrics:
    """Counters and histograms of one proxy."""

    def __init__(self, balancer: Balancer) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(PairCollector(balancer))
        labels = ("pair", "path", "status", "disaggregated", "outcome")
        self.requests = self._counter("requests", "Requests answered, by how it ended.", labels)
        self.skips = self._counter("prefill_skipped", "Requests that went to decode alone, by reason.", ("reason",))
        self.leg_failures = self._counter("leg_failures", "Failed legs, moved or not.", ("pair", "role", "kind"))
        self.retries = self._counter("retries", "Attempts after the first.", ())
        self.aborts = self._counter("client_aborts", "Clients that left, by phase.", ("phase",))
        self.tokens = self._counter("tokens", "Tokens in the usage that decode reported.", ("kind",))
        self.total = self._histogram("request_seconds", "Arrival to the end of the answer.", SECONDS)
        self.queue = self._histogram("queue_seconds", "Wait for a place on a pair.", SECONDS)
        self.prefill = self._histogram("prefill_seconds", "The prefill leg.", SECONDS)
        self.gap = self._histogram("prefill_to_decode_seconds", "End of prefill to decode's first byte.", SECONDS)
        self.first_byte = self._histogram("first_byte_seconds", "Arrival to decode's first byte.", SECONDS)
        self.between = self._histogram("inter_token_seconds", "Mean time between events of a stream.", ITL_SECONDS)
        self.config_reloads = self._counter("pair_source_updates", "Readings of the pair source.", ("result",))
        self._children: dict[tuple[str, ...], Counter] = {}

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=buckets)

    def observe(self, record: Record) -> None:
        """Count one finished request."""
        labels = (record.pair, record.path, str(record.status), record.disaggregated, record.outcome)
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self.requests.labels(*labels)
        child.inc()
        self.total.observe(record.total_s)
        self.queue.observe(record.queued_s)
        if record.skip_reason:
            self.skips.labels(record.skip_reason).inc()
        if record.prefill_s:
            self.prefill.observe(record.prefill_s)
        if record.first_byte_s:
            self.first_byte.observe(record.first_byte_s)
            if record.prefill_s:
                self.gap.observe(record.gap_s)
        if record.events > 2:
            self.between.observe((record.total_s - record.first_byte_s) / (record.events - 1))
        if record.attempts > 1:
            self.retries.inc(record.attempts - 1)
        if record.outcome == "client_gone":
            self.aborts.labels(record.phase).inc()
        if record.usage_prompt_tokens:
            self.tokens.labels("prompt").inc(record.usage_prompt_tokens)
            self.tokens.labels("completion").inc(record.usage_completion_tokens)

    def render(self) -> bytes:
        return bytes(generate_latest(self.registry))


class PairCollector(Collector):
    """Gauges of the pairs as they are at the moment of the scrape."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer

    def collect(self) -> Iterator[Metric]:
        now_s = time.monotonic()
        queue = GaugeMetricFamily(PREFIX + "queue_requests", "Requests that wait for a place.")
        queue.add_metric([], len(self.balancer.queue))
        inflight = GaugeMetricFamily(PREFIX + "pair_requests", "Requests on a pair.", labels=["pair"])
        kv_tokens = GaugeMetricFamily(
            PREFIX + "pair_kv_tokens", "Prompt tokens whose KV decode has not taken yet (estimate).", labels=["pair"]
        )
        legs = GaugeMetricFamily(PREFIX + "instance_requests", "Legs in flight.", labels=["pair", "role"])
        state = GaugeMetricFamily(
            PREFIX + "instance_state", "1 for the state the instance is in.", labels=["pair", "role", "state"]
        )
        ejections = CounterMetricFamily(
            PREFIX + "ejections", "Times an instance was left out for failed requests.", labels=["pair", "role"]
        )
        for pair in self.balancer.pairs.values():
            inflight.add_metric([pair.name], pair.inflight)
            kv_tokens.add_metric([pair.name], pair.kv_tokens)
            for instance in pair.instances:
                labels = [pair.name, instance.role]
                legs.add_metric(labels, instance.inflight)
                ejections.add_metric(labels, instance.ejections_total)
                now_in = instance.status(now_s)
                for name in STATES:
                    state.add_metric([*labels, name], float(name == now_in))
        yield from (queue, inflight, kv_tokens, legs, state, ejections)
