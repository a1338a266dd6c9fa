"""Keys in this process's memory: the store of `metadata serve --store memory`, and the reference for the contract."""

from __future__ import annotations

import threading
import time
from collections import deque

from mooncake_v0.metadata.store import DELETE, PUT, Change, Entry, Watch


class MemoryStore:
    """A dictionary with expiry and watches. Nothing survives the process."""

    def __init__(self) -> None:
        self.url = "memory:"
        self._values: dict[str, tuple[bytes, float | None]] = {}
        self._next_expiry: float | None = None
        self._watches: list[_MemoryWatch] = []
        self._lock = threading.RLock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            self._expire()
            found = self._values.get(key)
        return None if found is None else found[0]

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        expires_at = None if ttl_s is None else time.monotonic() + ttl_s
        with self._lock:
            self._expire()
            self._values[key] = (value, expires_at)
            if expires_at is not None:
                self._next_expiry = min(self._next_expiry or expires_at, expires_at)
            self._tell(Change(PUT, key, value))

    def delete(self, key: str, *, expected: bytes | None = None) -> bool:
        with self._lock:
            self._expire()
            found = self._values.get(key)
            if found is None or (expected is not None and found[0] != expected):
                return False
            del self._values[key]
            self._tell(Change(DELETE, key, None))
        return True

    def list(self, prefix: str) -> list[Entry]:
        with self._lock:
            self._expire()
            keys = sorted([key for key in self._values if key.startswith(prefix)])
            return [Entry(key, self._values[key][0]) for key in keys]

    def watch(self, prefix: str) -> Watch:
        watch = _MemoryWatch(self, prefix)
        with self._lock:
            self._watches.append(watch)
        return watch

    def close(self) -> None:
        with self._lock:
            self._values.clear()
            self._watches.clear()

    def forget(self, watch: _MemoryWatch) -> None:
        """Stop telling a watch; called by the watch itself."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def expire_now(self) -> None:
        """Drop what has expired and tell the watches; a waiting watch calls it."""
        with self._lock:
            self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        if self._next_expiry is None or now < self._next_expiry:
            return
        for key in [k for k, (_, at) in self._values.items() if at is not None and at <= now]:
            del self._values[key]
            self._tell(Change(DELETE, key, None))
        remaining = [at for _, at in self._values.values() if at is not None]
        self._next_expiry = min(remaining) if remaining else None

    def _tell(self, change: Change) -> None:
        for watch in self._watches:
            watch.offer(change)


class _MemoryWatch:
    """A queue filled by the store."""

    def __init__(self, store: MemoryStore, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._changes: deque[Change] = deque()
        self._arrived = threading.Condition()

    def offer(self, change: Change) -> None:
        if not change.key.startswith(self._prefix):
            return
        with self._arrived:
            self._changes.append(change)
            self._arrived.notify()

    def next(self, timeout_s: float) -> Change | None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._store.expire_now()
            with self._arrived:
                if self._changes:
                    return self._changes.popleft()
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._arrived.wait(min(left, 0.5))  # wakes to notice keys whose time is over

    def close(self) -> None:
        self._store.forget(self)
