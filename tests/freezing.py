"""Freeze a process: it stays there, and answers nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

DEADLINE_S = 10.0


def freeze(pid: int) -> None:
    """SIGSTOP, and wait until the last thread has stopped: the kernel takes its time on a busy machine, and until then
    the process answers.

    Raises ProcessLookupError when there is no such process.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.001)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    freeze(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it may have been replaced
            thaw(pid)


def _is_stopped(task: Path) -> bool:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True  # the thread has ended
    return state in "TZX"
