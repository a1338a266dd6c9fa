"""The worker's counters, and its agent's, on vLLM's own /metrics page.

vLLM's server collects the metrics of its processes through prometheus_client's multi-process mode, so plain counters of
any worker appear there. They exist only where a KV transfer is configured.
"""

from __future__ import annotations

import threading

from prometheus_client import Counter, Gauge, Histogram

from mooncake_v0.handoff import GAUGE
from mooncake_v0.transfer.messages import Status

_PREFIX = "mooncake_v0_"
_LEFT = ("evicted", "expired", "lost")
_STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class WorkerMetrics:
    """count("hits") and the like, names as in `kv.connector`; observe() the agent's reports."""

    def __init__(self) -> None:
        self._lookups = Counter(_PREFIX + "lookups", "Prompts looked up on decode, by outcome.", ["outcome"])
        self._stores = Counter(_PREFIX + "stores", "Prompts offered to the buffer on prefill, by outcome.", ["outcome"])
        self._totals = {
            name: Counter(_PREFIX + name, text)
            for name, text in (
                ("hit_tokens", "Prompt tokens that decode did not compute."),
                ("hit_bytes", "Bytes of KV that decode took from the buffer."),
                ("filled_ahead", "Hits that joined running requests without a step of their own."),
                ("stored_tokens", "Prompt tokens whose KV prefill stored."),
                ("wait_seconds", "Time that decode's engine step waited for entries."),
                ("gather_seconds", "Time that prefill's engine step spent on copying blocks into the buffer."),
                ("scatter_seconds", "Time that decode's engine step copied blocks into its cache."),
            )
        }
        self._receive = Histogram(
            _PREFIX + "receive_seconds",
            "Time that decode's engine step took to get one batch's KV.",
            buckets=_STEP_SECONDS,
        )
        self._agent = AgentMetrics()

    def count(self, name: str, value: float) -> None:
        if name == "hits":
            self._lookups.labels("hit").inc(value)
        elif name.startswith("miss_"):
            self._lookups.labels(name).inc(value)
        elif name == "stored_prompts" or name.startswith("skipped_"):
            self._stores.labels("stored" if name == "stored_prompts" else name).inc(value)
        elif name == "receive_seconds":
            self._receive.observe(value)
        elif name in self._totals:
            self._totals[name].inc(value)

    def observe(self, status: Status | None) -> None:
        self._agent.observe(status)

    def show_early_decode(self) -> None:
        """From now on say with whom early decode works: this worker and the scheduler are in one process."""
        self._agent.show_early_decode()


class AgentMetrics:
    """The state of the transfer agents: gauges over all ranks of an instance, counters over all agents of its life."""

    def __init__(self) -> None:
        self._peer_up = Gauge(_PREFIX + "peer_up", "1 while every rank has its peer.", multiprocess_mode="livemin")
        self._gauges = {
            name: Gauge(_PREFIX + name, text, multiprocess_mode="livesum")
            for name, text in (
                ("buffer_bytes", "Bytes of the buffer in use."),
                ("buffer_limit_bytes", "Size of the buffer."),
                ("buffer_entries", "Prompts whose KV is there."),
                ("transfers_in_flight", "Prompts on their way to decode, or offered by prefill and not taken yet."),
            )
        }
        self._left = Counter(_PREFIX + "entries_left", "Entries that left the buffer, by reason.", ["reason"])
        self._read = {
            name: Counter(_PREFIX + name, text)
            for name, text in (
                ("reads", "Reads by the engine."),
                ("read_bytes", "Bytes that the engine read."),
                ("read_failed", "Reads that failed."),
                ("corrupt", "Entries that arrived with another checksum."),
            )
        }
        self._read_seconds = Counter(_PREFIX + "read_seconds", "Time of the engine's reads.")
        self._early = Gauge(
            GAUGE,
            "1 for the two agents, this one and its peer, between which decode takes requests early.",
            ["epoch", "peer_epoch"],
            multiprocess_mode="livemax",
        )
        self._early_labels: tuple[str, str] | None = None
        self._shows_early = False
        self._last: Status | None = None
        self._ended = Counter(_PREFIX + "agent_ends", "Transfer agents that ended, each followed by another.")
        self._lock = threading.Lock()
        self._epoch = ""
        self._seen: dict[str, float] = {}

    def observe(self, status: Status | None) -> None:
        """A report; None when the agent has ended."""
        with self._lock:
            self._last = status
            self._observe_early(status)
            self._peer_up.set(int(status is not None and bool(status.peer_epoch)))
            if status is None:
                self._ended.inc()
                return
            self._gauges["buffer_bytes"].set(status.buffer_bytes)
            self._gauges["buffer_limit_bytes"].set(status.buffer_limit_bytes)
            self._gauges["buffer_entries"].set(status.entries)
            self._gauges["transfers_in_flight"].set(status.in_flight)
            self._count(status)

    def show_early_decode(self) -> None:
        with self._lock:
            self._shows_early = True
            self._observe_early(self._last)

    def _observe_early(self, status: Status | None) -> None:
        labels = None if status is None or not status.peer_epoch else (status.epoch, status.peer_epoch)
        if not self._shows_early or labels == self._early_labels:
            return
        if self._early_labels is not None:
            self._early.labels(*self._early_labels).set(0)
        if labels is not None:
            self._early.labels(*labels).set(1)
        self._early_labels = labels

    def _count(self, status: Status) -> None:
        """What the counters have grown by; those of a new agent begin at zero."""
        if status.epoch != self._epoch:
            self._epoch, self._seen = status.epoch, {}
        grown = {name: value - self._seen.get(name, 0.0) for name, value in status.counters.items()}
        self._seen = dict(status.counters)
        for reason in _LEFT:
            self._left.labels(reason).inc(grown.get(reason, 0.0))
        for name, counter in self._read.items():
            counter.inc(grown.get(name, 0.0))
        self._read_seconds.inc(grown.get("read_us", 0.0) / 1e6)
