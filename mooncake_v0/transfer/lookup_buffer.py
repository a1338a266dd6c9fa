"""The content-addressed lookup buffer: entries by key, their states, and what leaves when space is needed.

One agent owns one; it has no sockets, no threads and no clock of its own. An entry's life::

    producer   RESERVED ──commit──► READY ──read by the peer──► HELD (the peer has it too; still here until evicted)
    consumer   RESERVED ──first bytes ready──► TRANSFERRING ──read and confirmed──► HELD

and from every state out of the buffer: EVICTED (least recent use, for space), EXPIRED (age), LOST (peer's epoch ended,
read failed, aborted). Each way out is counted. A look-up removes nothing. A pinned entry (being written, read or
scattered) is never evicted; its bytes are freed when the last pin goes. The bytes of an evicted entry are reused at once;
those of an expired or lost one are cleared first, a little at a time (`clear_some`), so that they do not lie there for
whoever can read the pool.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from typing import Callable, Iterator

import msgspec

from mooncake_v0.transfer.pool import Allocator

RESERVED = "reserved"
TRANSFERRING = "transferring"
READY = "ready"
HELD = "held"

EVICTED = "evicted"
EXPIRED = "expired"
LOST = "lost"

TOO_LARGE = "too_large"
FULL = "full"


class Entry(msgspec.Struct, eq=False, gc=False):
    """One key's bytes in the pool. generation tells a reader whether the region was reused under the same key.

    checksum: of the complete entry, once it is known
    """

    key: bytes
    nbytes: int
    offset: int
    state: str
    generation: int
    used_at_s: float
    ready_nbytes: int = 0
    pins: int = 0
    checksum: int | None = None
    doomed: bool = False


class LookupBuffer:
    """Entries in a pool of limit_bytes; a hard limit, counted on what is stored.

    on_free: called with an entry before its bytes may change; clear: sets (offset, nbytes) of the pool to zero
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        ttl_s: float,
        on_free: Callable[[Entry], None] = lambda entry: None,
        clear: Callable[[int, int], None] = lambda offset, nbytes: None,
    ) -> None:
        self.allocator = Allocator(limit_bytes)
        self.ttl_s = ttl_s
        self.counters: Counter[str] = Counter()
        self.dropped: list[bytes] = []  # keys that left since take_dropped(); a consumer tells its peer
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first
        # never one of an agent before this one, whose entries another process may still be looking at
        self._generation = int.from_bytes(os.urandom(5), "little") << 22
        self._on_free = on_free
        self._clear = clear
        self._uncleared: dict[Entry, int] = {}  # leading bytes that are cleared; each has one pin of ours

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    @property
    def used_bytes(self) -> int:
        return self.allocator.used_bytes

    @property
    def limit_bytes(self) -> int:
        return self.allocator.limit_bytes

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def touch(self, entry: Entry, now_s: float) -> None:
        entry.used_at_s = now_s
        self._entries.move_to_end(entry.key)

    def insert(self, key: bytes, nbytes: int, now_s: float) -> Entry | str:
        """A new RESERVED and pinned entry, or the reason why there is no space for it: TOO_LARGE or FULL."""
        if self.allocator.rounded(nbytes) > self.limit_bytes:
            self.counters["refused_too_large"] += 1
            return TOO_LARGE
        offset = self.allocator.allocate(nbytes)
        while offset is None:
            if not self.clear_some(nbytes) and not self._evict_one():
                self.counters["refused_full"] += 1
                return FULL
            offset = self.allocator.allocate(nbytes)
        self._generation += 1
        entry = Entry(key, nbytes, offset, RESERVED, self._generation, now_s, pins=1)
        self._entries[key] = entry
        return entry

    def pin(self, entry: Entry) -> None:
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if entry.doomed and not entry.pins:
            self._free(entry)

    def remove(self, entry: Entry, why: str) -> None:
        """Take an entry out; its bytes are freed now, or with its last pin. why: EVICTED, EXPIRED or LOST."""
        if self._entries.get(entry.key) is not entry:
            return
        del self._entries[entry.key]
        self.counters[why] += 1
        self.dropped.append(entry.key)
        entry.doomed = True
        if why != EVICTED:
            self.pin(entry)
            self._uncleared[entry] = 0
        elif not entry.pins:
            self._free(entry)

    def expire(self, now_s: float) -> None:
        """Remove what has not been used for ttl_s."""
        expired = []
        for entry in self._entries.values():  # least recently used first: stops at the first that is young enough
            if entry.used_at_s + self.ttl_s > now_s:
                break
            if not entry.pins:
                expired.append(entry)
        for entry in expired:
            self.remove(entry, EXPIRED)

    def _free(self, entry: Entry) -> None:
        self._on_free(entry)
        self.allocator.free(entry.offset)

    def clear_some(self, budget_bytes: int) -> bool:
        """Clear so many bytes of entries that expired or were lost, and free those that are done; False if none was."""
        left_bytes = budget_bytes
        for entry, start in [(entry, start) for entry, start in self._uncleared.items() if entry.pins == 1]:
            nbytes = min(left_bytes, entry.nbytes - start)
            self._on_free(entry)
            self._clear(entry.offset + start, nbytes)
            left_bytes -= nbytes
            self._uncleared[entry] = start + nbytes
            if start + nbytes == entry.nbytes:
                del self._uncleared[entry]
                self.unpin(entry)
            if not left_bytes:
                break
        return left_bytes < budget_bytes

    def take_dropped(self) -> list[bytes]:
        dropped, self.dropped = self.dropped, []
        return dropped

    def _evict_one(self) -> bool:
        for entry in self._entries.values():
            if not entry.pins:
                self.remove(entry, EVICTED)
                return True
        return False
