"""Decode's view of the entries in prefill's own pool, where that is mapped on the same host.

They are never copied into decode's buffer and never pinned at the peer: the worker copies them straight into its cache and
compares the generation in the pool's table before and after. A peer that reuses a region clears the cell before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mooncake_v0.transfer.messages import Ready
from mooncake_v0.transfer.pool import ALIGNMENT_BYTES

UNCONFIRMED_S = 60.0  # an announced entry that is not offered for so long is not waited for
MAX_EXPECTED = 100_000


@dataclass(frozen=True)
class MappedEntry:
    """Where an entry lies in the peer's pool."""

    key: bytes
    offset: int
    nbytes: int
    generation: int


class MappedEntries:
    """number: of the mapped pool in use, 0 while there is none."""

    def __init__(self, counters: Counter[str]) -> None:
        self.number = 0
        self._address = 0
        self._nbytes = 0
        self._counters = counters
        self._here: dict[bytes, MappedEntry] = {}
        self._expected: dict[bytes, float] = {}  # announced → since, monotonic seconds

    def __len__(self) -> int:
        return len(self._here)

    def activate(self, number: int, address: int, nbytes: int) -> None:
        """The worker has mapped the peer's pool, whose bytes lie at this address in the peer's agent."""
        self.number, self._address, self._nbytes = number, address, nbytes

    def deactivate(self) -> None:
        self.number = 0
        self._here.clear()
        self._expected.clear()

    def expect(self, key: bytes, now_s: float) -> None:
        if key not in self._here and len(self._expected) < MAX_EXPECTED:
            self._expected[key] = now_s

    def offer(self, ready: Ready, now_s: float) -> bool:
        """Take note of an entry; False if it does not lie in the mapped pool."""
        offset = ready.address - self._address
        if not 0 <= offset <= self._nbytes - ready.nbytes or len(self._here) > self._nbytes // ALIGNMENT_BYTES:
            return False
        if ready.ready_nbytes < ready.nbytes:
            self.expect(ready.key, now_s)
            return True
        self._expected.pop(ready.key, None)
        if ready.key not in self._here:
            self._counters["mapped"] += 1
        self._here[ready.key] = MappedEntry(ready.key, offset, ready.nbytes, ready.generation)
        return True

    def get(self, key: bytes) -> MappedEntry | None:
        return self._here.get(key)

    def is_expected(self, key: bytes) -> bool:
        return key in self._expected

    def forget(self, key: bytes) -> bool:
        """It will not come, or is gone."""
        known = self._expected.pop(key, None) is not None
        return self._here.pop(key, None) is not None or known

    def tick(self, now_s: float) -> None:
        for key, since_s in list(self._expected.items()):
            if now_s - since_s > UNCONFIRMED_S:
                del self._expected[key]
