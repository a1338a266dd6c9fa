"""The transfer agents of real instances, seen from outside."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def find_agent(instance_pid: int) -> psutil.Process:
    """The transfer agent among an instance's descendants."""
    children = psutil.Process(instance_pid).children(recursive=True)
    (agent,) = [child for child in children if "mooncake_v0.transfer.agent" in child.cmdline()]
    return agent


def pool_path(agent: psutil.Process) -> Path:
    """The memfd, through the process's own descriptor."""
    descriptors = Path(f"/proc/{agent.pid}/fd").iterdir()
    return next(path for path in descriptors if "mooncake-v0-pool" in os.readlink(path))


def read_pool(agent: psutil.Process) -> bytes:
    return pool_path(agent).read_bytes()


def first_difference(before: bytes, agent: psutil.Process) -> int:
    """Offset of the first changed page, waiting until the entry has arrived."""
    page = 4096
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        after = read_pool(agent)
        for start in range(0, len(after), page):
            if after[start : start + page] != before[start : start + page]:
                return start
    raise AssertionError("nothing arrived in the pool")


def flip_sign(agent: psutil.Process, offset: int) -> None:
    """Change one byte: the high one of a bfloat16 (little endian), so its sign."""
    with pool_path(agent).open("r+b") as pool:
        pool.seek(offset + 1)
        (value,) = pool.read(1)
        pool.seek(offset + 1)
        pool.write(bytes([value ^ 0x80]))
