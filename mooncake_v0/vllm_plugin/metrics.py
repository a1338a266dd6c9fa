"""The worker's counters on vLLM's own /metrics page.

vLLM's server collects the metrics of its processes through prometheus_client's multi-process mode, so plain counters of
any worker appear there. They exist only where a KV transfer is configured.
"""

from __future__ import annotations

from prometheus_client import Counter

_PREFIX = "mooncake_v0_"


class WorkerMetrics:
    """count("hits") and the like; names as in `kv.connector`."""

    def __init__(self) -> None:
        self._lookups = Counter(_PREFIX + "lookups", "Prompts looked up on decode, by outcome.", ["outcome"])
        self._stores = Counter(_PREFIX + "stores", "Prompts offered to the buffer on prefill, by outcome.", ["outcome"])
        self._totals = {
            name: Counter(_PREFIX + name, text)
            for name, text in (
                ("hit_tokens", "Prompt tokens that decode did not compute."),
                ("hit_bytes", "Bytes of KV that decode took from the buffer."),
                ("stored_tokens", "Prompt tokens whose KV prefill stored."),
                ("wait_seconds", "Time that decode's engine step waited for entries."),
                ("gather_seconds", "Time that prefill's engine step copied blocks into the buffer."),
                ("scatter_seconds", "Time that decode's engine step copied blocks into its cache."),
            )
        }

    def count(self, name: str, value: float) -> None:
        if name == "hits":
            self._lookups.labels("hit").inc(value)
        elif name.startswith("miss_"):
            self._lookups.labels(name).inc(value)
        elif name == "stored_prompts" or name.startswith("skipped_"):
            self._stores.labels("stored" if name == "stored_prompts" else name).inc(value)
        elif name in self._totals:
            self._totals[name].inc(value)
