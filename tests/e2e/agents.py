"""The transfer agents of real instances, seen from outside."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Callable

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
    """Offset of the first page that is not as before."""
    page = 4096
    after = read_pool(agent)
    return next(
        start for start in range(0, len(after), page) if after[start : start + page] != before[start : start + page]
    )


def overwrite_byte(agent: psutil.Process, offset: int) -> None:
    """Change one byte: the high one of a float32 (little endian), which becomes a number between 128 and 512."""
    with pool_path(agent).open("r+b") as pool:
        pool.seek(offset + 3)
        pool.write(b"\x43")


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
