"""What the pair holds: memory, descriptors, processes, shared memory and metadata keys, before and after.

Memory is the anonymous part of RSS (RssAnon): the pool is shared memory that every process of an instance maps and is
counted once, by its size; pages of files say nothing about a leak.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import psutil

from mooncake_v0.errors import MooncakeV0Error
from mooncake_v0.metadata.store import open_store
from tests.soak.chaos.soak_pair import INSTANCES, SoakPair

MIB = 1 << 20
POOL_NAME = "memfd:mooncake-v0-pool"
# Idle connections: the proxy keeps some to each instance, uvicorn closes its own after 5 s, zmq reopens its sockets.
DESCRIPTORS_MORE = 16
# Python's multiprocessing in vLLM's API server has named semaphores, which its resource tracker removes. Where the kernel
# ends an instance as a whole, and the tracker with it, they stay: 32 bytes each, until the host or container restarts.
SEMAPHORE = "sem.mp-"
# A plain instance of the pin under this load grows from 800 to 1,330 MiB in its first 1,200 requests, with every new
# shape of a batch, and then hardly more: so an instance may have that and a fifth. The other processes have nothing that
# depends on batches.
INSTANCE_PLATEAU_BYTES = 1600 * MIB
INSTANCE_MEMORY_SHARE = 0.20
OTHER_MEMORY_MORE_BYTES = 12 * MIB
SETTLE_S = 90.0


@dataclass(frozen=True)
class Held:
    """One part of the pair: number of processes, bytes of anonymous memory, open descriptors."""

    processes: int
    memory_bytes: int
    descriptors: int


@dataclass(frozen=True)
class Resources:
    """pools: sizes of the memfds; shared: names in /dev/shm but for semaphores; strays: processes that belong to no part."""

    parts: dict[str, Held]
    pools: list[int]
    keys: list[str]
    shared: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)


def parts_of(pair: SoakPair) -> dict[str, list[psutil.Process]]:
    """The processes of each part: two servers, two instances, and the instances' agents on their own."""
    groups: dict[str, list[psutil.Process]] = {}
    for name in ("metadata", "proxy", *INSTANCES):
        groups[name] = pair.tree(name)
        agent = pair.agent(name) if name in INSTANCES else None
        if agent is not None:
            groups[name] = [process for process in groups[name] if process != agent]
            groups[f"{name}'s agent"] = [agent]
    return groups


def memory_line(pair: SoakPair) -> str:
    """Anonymous memory of each part now, in MiB."""
    return ", ".join(f"{name} {_held(group).memory_bytes / MIB:.0f}" for name, group in parts_of(pair).items())


def measure(pair: SoakPair, *, isolated: bool) -> Resources:
    """isolated: /proc and /dev/shm show only what belongs to the soak."""
    groups = parts_of(pair)
    everyone = [process for group in groups.values() for process in group]
    return Resources(
        parts={name: _held(group) for name, group in groups.items()},
        pools=_pools(psutil.pids() if isolated else [process.pid for process in everyone]),
        keys=_keys(pair.metadata_url),
        shared=sorted(name for name in os.listdir("/dev/shm") if not name.startswith(SEMAPHORE)) if isolated else [],
        strays=_strays(pair, everyone) if isolated else [],
    )


def differences(before: Resources, after: Resources) -> list[str]:
    """What `after` has that it should not, or lacks; nothing when it is as before, within the tolerances."""
    found = []
    for name, held in before.parts.items():
        found += _part_differs(name, held, after.parts.get(name, Held(0, 0, 0)))
    found += [f"{name} is new" for name in after.parts.keys() - before.parts.keys()]
    for what, old, new in (
        ("pools", before.pools, after.pools),
        ("metadata keys", before.keys, after.keys),
        ("/dev/shm", before.shared, after.shared),
        ("processes of no part", before.strays, after.strays),
    ):
        if old != new:
            found.append(f"{what}: {old} before, {new} after")
    return found


def wait_settled(before: Resources, measured: Callable[[], Resources]) -> tuple[Resources, list[str]]:
    """The last measurement and what still differs when nothing does any more, or after SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        after = measured()
        found = differences(before, after)
        if not found or time.monotonic() > deadline_s:
            return after, found
        time.sleep(1.0)


def _part_differs(name: str, old: Held, new: Held) -> list[str]:
    allowed = old.memory_bytes + OTHER_MEMORY_MORE_BYTES
    if name in INSTANCES:
        allowed = max(round(old.memory_bytes * (1 + INSTANCE_MEMORY_SHARE)), INSTANCE_PLATEAU_BYTES)
    found = []
    if new.processes != old.processes:
        found.append(f"{name}: {old.processes} processes before, {new.processes} after")
    if new.memory_bytes > allowed:
        found.append(f"{name}: {old.memory_bytes / MIB:.0f} MiB before, {new.memory_bytes / MIB:.0f} MiB after")
    if new.descriptors > old.descriptors + DESCRIPTORS_MORE:
        found.append(f"{name}: {old.descriptors} descriptors before, {new.descriptors} after")
    return found


def _held(group: list[psutil.Process]) -> Held:
    processes = memory_bytes = descriptors = 0
    for process in group:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            descriptors += process.num_fds()
        except (OSError, psutil.NoSuchProcess):
            continue
        processes += 1
        memory_bytes += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))
    return Held(processes, memory_bytes, descriptors)


def _pools(pids: list[int]) -> list[int]:
    """Sizes of the different pools that any of these processes has open."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            links = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        for link in links:
            try:
                if POOL_NAME in os.readlink(link):
                    status = os.stat(link)
                    found[(status.st_dev, status.st_ino)] = status.st_size
            except OSError:
                continue
    return sorted(found.values())


def _keys(url: str) -> list[str]:
    store = open_store(url)
    try:
        return sorted(entry.key for entry in store.list(""))
    except MooncakeV0Error as error:
        return [f"not read: {error}"]
    finally:
        store.close()


def _strays(pair: SoakPair, everyone: list[psutil.Process]) -> list[str]:
    """Commands of processes that nobody started here knows: left behind by one that died."""
    known = {process.pid for process in everyone} | {1, os.getpid()}
    if pair.link is not None:
        known.add(pair.link.pid)
    found = []
    for process in psutil.process_iter():
        if process.pid in known:
            continue
        try:
            found.append(f"{process.status()} {' '.join(process.cmdline())[:100]}")
        except psutil.NoSuchProcess:
            continue
    return sorted(found)
