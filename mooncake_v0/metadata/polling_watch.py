"""A watch for stores that cannot tell of changes themselves (sqlite, redis): list, compare, wait.

Two changes of one key within a poll are seen as one, and a rewrite with the same bytes is not seen.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from mooncake_v0.metadata.store import DELETE, PUT, Change

if TYPE_CHECKING:
    from mooncake_v0.metadata.store import MetadataStore

POLL_INTERVAL_S = 0.5


class PollingWatch:
    """Differences between successive lists of a prefix."""

    def __init__(self, store: MetadataStore, prefix: str, *, interval_s: float = POLL_INTERVAL_S) -> None:
        self._store = store
        self._prefix = prefix
        self._interval_s = interval_s
        self._changes: deque[Change] = deque()
        self._known = {entry.key: entry.value for entry in store.list(prefix)}

    def next(self, timeout_s: float) -> Change | None:
        deadline = time.monotonic() + timeout_s
        while not self._changes:
            self._poll()
            if self._changes:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(left, self._interval_s))
        return self._changes.popleft()

    def close(self) -> None:
        self._known.clear()

    def _poll(self) -> None:
        current = {entry.key: entry.value for entry in self._store.list(self._prefix)}
        for key, value in current.items():
            if self._known.get(key) != value:
                self._changes.append(Change(PUT, key, value))
        for key in self._known:
            if key not in current:
                self._changes.append(Change(DELETE, key, None))
        self._known = current
