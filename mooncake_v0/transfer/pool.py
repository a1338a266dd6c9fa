"""The shared pool: one memfd mapped by a worker and its agent, and the allocator of its bytes.

The worker creates it and hands the descriptor to each agent that it starts, so that the memory, its page locks and the
worker's views survive a restart of the agent. A memfd is not bounded by a container's 64 MiB /dev/shm and vanishes with
the last process that holds it. A pool in device memory (`DeviceMemory`, of the worker) is there for two instances on one
host; its memfd holds one page that the engine is given in its place, and what follows.

Behind the pool's own bytes lies a page with a nonce, the word of the agent whether it has a peer (without one the worker
need not ask it anything) and a count of its news (without any it need not ask again), and a table with one cell for each
page of the pool: the generation of the complete entry that begins there, 0 where none does. A consumer on the same host maps
the whole and copies entries straight out of it, without asking: it compares the cell before and after its copy, as with a
seqlock.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any, Callable, Protocol

from mooncake_v0.errors import TransferError

ALIGNMENT_BYTES = 4096
NONCE_BYTES = 16
_CELL_BYTES = 8
_NEWS_AT = 24  # behind the nonce and the peer's word, aligned
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.9 has no name for it


class DeviceMemory(Protocol):
    """Memory of a GPU that processes on this host can share. handle: what another one opens it by."""

    handle: bytes
    tensor: Any  # uint8 [nbytes]

    def close(self) -> None: ...


class Pool:
    """A mapping of the shared pool; `address` is valid in this process only.

    nbytes:      what entries are laid out in
    host_nbytes: of these in host memory, from `address` on: all of them, or one page that nothing is written to
    device:      the memory itself where it is a GPU's, in a worker; its agent has no access to it
    """

    def __init__(self, fd: int, nbytes: int, *, on_device: bool = False, device: DeviceMemory | None = None) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.on_device = on_device
        self.device = device
        self.host_nbytes = _host_nbytes(nbytes, on_device)
        self.map = mmap.mmap(fd, shared_nbytes(nbytes, on_device))
        self._anchor = (ctypes.c_char * self.host_nbytes).from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)
        self._news = memoryview(self.map)[self.host_nbytes + _NEWS_AT : self.host_nbytes + _NEWS_AT + _CELL_BYTES].cast(
            "Q"
        )
        self._cells = memoryview(self.map)[self.host_nbytes + ALIGNMENT_BYTES :].cast("Q")

    @classmethod
    def create(cls, nbytes: int, allocate: Callable[[int], DeviceMemory] | None = None) -> Pool:
        """Make a new pool of nbytes, rounded down to whole pages. Host memory is not touched yet.

        allocate: makes its memory on a GPU; without it the pool is in host memory
        """
        nbytes = max(1, nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        device = None if allocate is None else allocate(nbytes)
        on_device = device is not None
        check_memory(_host_nbytes(nbytes, on_device))
        fd = os.memfd_create("mooncake-v0-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, shared_nbytes(nbytes, on_device))
        # another process that maps it must never meet a missing page, which would end it with SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(fd, nbytes, on_device=on_device, device=device)

    def allocate_pages(self) -> None:
        """Have the kernel allocate every page now: the first touch of a page costs more than copying into it."""
        try:
            os.posix_fallocate(self.fd, 0, len(self.map))
        except OSError as error:
            raise TransferError(
                f"cannot allocate the pool of {self.host_nbytes} bytes: {error.strerror}",
                fix="lower kv_buffer_size or give the host or container more memory",
            ) from error

    def map_pages(self) -> None:
        """Fill this process's page table for the pool, where the kernel can do it in one call."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.host_nbytes), _MADV_POPULATE_WRITE)

    def clear(self, offset: int, nbytes: int) -> None:
        """Set bytes to zero; those of a GPU are out of reach of an agent, and of the engine's port."""
        if not self.on_device:
            ctypes.memset(self.address + offset, 0, nbytes)

    @property
    def nonce(self) -> bytes:
        return bytes(self.map[self.host_nbytes : self.host_nbytes + NONCE_BYTES])

    @nonce.setter
    def nonce(self, value: bytes) -> None:
        self.map[self.host_nbytes : self.host_nbytes + NONCE_BYTES] = value

    @property
    def news(self) -> int:
        """Counts what may settle an entry that decode's worker waits for."""
        return self._news[0]

    def add_news(self) -> None:
        self._news[0] = (self._news[0] + 1) & 0xFFFF_FFFF

    @property
    def has_peer(self) -> bool:
        return self.map[self.host_nbytes + NONCE_BYTES] != 0

    @has_peer.setter
    def has_peer(self, value: bool) -> None:
        self.map[self.host_nbytes + NONCE_BYTES] = int(value)

    def generation_at(self, offset: int) -> int:
        """Generation of the complete entry that begins at this offset; 0 where none does."""
        return self._cells[offset // ALIGNMENT_BYTES]

    def set_generation(self, offset: int, generation: int) -> None:
        """Say that an entry is complete, or with 0 that its bytes may change from now on. Of the owning agent only."""
        self._cells[offset // ALIGNMENT_BYTES] = generation

    def clear_generations(self) -> None:
        """Nothing in this pool is an entry: a new agent begins."""
        self._cells[:] = memoryview(bytes(self._cells.nbytes)).cast("Q")

    def close(self) -> None:
        """Close the descriptor and device memory; the mapping itself lives as long as views of it do."""
        os.close(self.fd)
        if self.device is not None:
            self.device.close()


def shared_nbytes(nbytes: int, on_device: bool = False) -> int:
    """Size of the memfd of a pool of nbytes (whole pages): the pool, the nonce's page, the table in whole pages."""
    table = nbytes // ALIGNMENT_BYTES * _CELL_BYTES
    return _host_nbytes(nbytes, on_device) + ALIGNMENT_BYTES + -(-table // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _host_nbytes(nbytes: int, on_device: bool) -> int:
    return ALIGNMENT_BYTES if on_device else nbytes


def check_memory(nbytes: int) -> None:
    """Refuse a pool that cannot fit, before the kernel's out-of-memory killer does it in its own way."""
    for what, available in (("this host", _host_available()), ("this container", _container_available())):
        if available is not None and nbytes > available:
            raise TransferError(
                f"kv_buffer_size {nbytes} bytes does not fit: {what} has {available} bytes of memory available",
                fix="lower kv_buffer_size in --kv-transfer-config, or give it more memory",
            )


def _host_available() -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def _container_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group's limit leaves; None without a limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (root / limit_name).read_text().strip(), int((root / used_name).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max" and int(limit) < 1 << 62:
            return int(limit) - used
    return None


class Allocator:
    """Best fit over free extents, neighbours merged; every operation is logarithmic in the number of extents.

    `limit_bytes` is hard: no two allocations together exceed it. Offsets and sizes are page-aligned, so that views of
    any dtype are aligned and a peer's read never shares a page with another entry.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.used_bytes = 0
        self._by_size: list[tuple[int, int]] = []  # (size, offset), sorted
        self._end_of: dict[int, int] = {}  # free extent: offset -> end
        self._start_of: dict[int, int] = {}  # free extent: end -> offset
        self._sizes: dict[int, int] = {}  # allocation: offset -> size
        if self.limit_bytes:
            self._add_free(0, self.limit_bytes)

    @staticmethod
    def rounded(nbytes: int) -> int:
        return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free extent of nbytes, or None when no extent is large enough."""
        size = self.rounded(nbytes)
        at = bisect.bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        extent_size, offset = self._by_size[at]
        self._remove_free(offset, offset + extent_size)
        if extent_size > size:
            self._add_free(offset + size, offset + extent_size)
        self._sizes[offset] = size
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Return an allocation; merges with free neighbours."""
        size = self._sizes.pop(offset)
        self.used_bytes -= size
        start, end = offset, offset + size
        if start in self._start_of:
            before = self._start_of[start]
            self._remove_free(before, start)
            start = before
        if end in self._end_of:
            after = self._end_of[end]
            self._remove_free(end, after)
            end = after
        self._add_free(start, end)

    def _add_free(self, start: int, end: int) -> None:
        bisect.insort(self._by_size, (end - start, start))
        self._end_of[start] = end
        self._start_of[end] = start

    def _remove_free(self, start: int, end: int) -> None:
        del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]
        del self._end_of[start]
        del self._start_of[end]
