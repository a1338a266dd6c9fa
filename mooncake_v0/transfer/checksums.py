"""A checksum per entry (xxh3, 64 bits), computed in a thread of its own on both sides of a read.

Prefill hashes an entry from its commit on, while decode reads it; decode hashes each part while the next one is read. So
what a prompt waits for is the hash of the last part, where there are cores to spare. In `auto` the checksum is on for tcp on
hosts with at least MIN_CPUS, and decode switches it off, and says so, when it makes entries more than MAX_COST later. An
RDMA fabric has checks of its own, and a mapped pool nothing to check.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mooncake_v0.transfer.agent_settings import AUTO, ON
from mooncake_v0.transfer.pool import Pool
from mooncake_v0.transfer.wake_up import WakeUp

logger = logging.getLogger(__name__)

MIN_CPUS = 4  # two agents on one host, each with a thread that reads or serves and one that hashes
MAX_COST = 0.05
_MEASURED_READ_S = 1.0


@dataclass
class Running:
    """The hash of one entry, part by part. token: whose it is; digest: set when it is complete."""

    token: Any
    state: Any = field(default_factory=xxhash.xxh3_64)
    digest: int | None = None


class Hasher(threading.Thread):
    """Hashes bytes of the pool in order. `submit` from the main loop, which is woken when an entry is complete."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(name="checksums", daemon=True)
        self.wake_up = WakeUp()
        self._bytes = memoryview(pool.map)
        self._jobs: queue.SimpleQueue[tuple[Running, int, int, bool]] = queue.SimpleQueue()
        self._complete: deque[Running] = deque()

    def submit(self, running: Running, offset: int, nbytes: int, is_last: bool) -> None:
        self._jobs.put((running, offset, nbytes, is_last))

    def take_complete(self) -> list[Running]:
        self.wake_up.clear()
        found = []
        while self._complete:
            found.append(self._complete.popleft())
        return found

    def run(self) -> None:
        while True:
            running, offset, nbytes, is_last = self._jobs.get()
            running.state.update(self._bytes[offset : offset + nbytes])  # releases the interpreter lock
            if is_last:
                running.digest = running.state.intdigest()
                self._complete.append(running)
                self.wake_up.set()


def is_wanted(choice: str, protocol: str) -> bool:
    """Whether an agent begins with checksums."""
    if choice == AUTO:
        return protocol == "tcp" and len(os.sched_getaffinity(0)) >= MIN_CPUS
    return choice == ON


class Cost:
    """How much later entries are ready because of their checksum, as a share of the time that reading takes."""

    def __init__(self) -> None:
        self._read_s = self._waited_s = 0.0

    def add(self, read_s: float, read_ended_s: float) -> bool:
        """One entry is complete now; True once it is known that this costs more than MAX_COST."""
        self._read_s += read_s
        self._waited_s += time.monotonic() - read_ended_s
        return self._read_s >= _MEASURED_READ_S and self._waited_s > MAX_COST * self._read_s

    def __str__(self) -> str:
        return f"{self._waited_s / self._read_s:.1%} of {self._read_s:.1f} s of reading" if self._read_s else "unknown"
