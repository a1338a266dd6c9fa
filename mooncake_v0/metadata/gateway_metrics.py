"""The gateway's Prometheus metrics; no label ever holds a key, a value or a login."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mooncake_v0.metadata.store_runner import StoreRunner

KNOWN_METHODS = ("GET", "PUT", "DELETE")
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0)


class GatewayMetrics:
    """A registry of its own, so that several gateways in one process do not collide."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mooncake_metadata_requests", "Requests answered.", ["method", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "mooncake_metadata_request_seconds", "Time to answer.", buckets=BUCKETS_S, registry=self._registry
        )
        self._store_up = Gauge("mooncake_metadata_store_up", "1 while the store answers.", registry=self._registry)
        self._store_failures = Gauge(
            "mooncake_metadata_store_failures", "Calls that the store did not answer.", registry=self._registry
        )
        self.connections = Gauge("mooncake_metadata_connections", "Open connections.", registry=self._registry)
        self.watchers = Gauge("mooncake_metadata_watchers", "Open watches.", registry=self._registry)
        self._children: dict[tuple[str, int], Counter] = {}

    def count(self, method: str, status: int, seconds: float) -> None:
        child = self._children.get((method, status))
        if child is None:
            known = method if method in KNOWN_METHODS else "other"
            child = self._children[(method if known == method else known, status)] = self._requests.labels(
                known, status
            )
        child.inc()
        self._seconds.observe(seconds)

    def text(self, runner: StoreRunner) -> bytes:
        self._store_up.set(runner.is_up)
        self._store_failures.set(runner.failures)
        return generate_latest(self._registry)
