"""Namespaces of its own for a soak: network, processes, mounts and IPC, so that nothing of it can be left behind.

`run_isolated` starts the soak again inside. There its /proc and /dev/shm show what it made and nothing else, and when the
first process of the namespace ends, for whatever reason, the kernel ends all others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import Sequence

_PR_SET_PDEATHSIG = 1
_END_S = 60.0


def isolate_command() -> list[str]:
    """unshare with everything; a user who is not root becomes one in a namespace of their own, where that is allowed."""
    user = ["--user", "--map-root-user"] if os.geteuid() != 0 else []
    kinds = ["--net", "--ipc", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child"]
    return ["unshare", *user, *kinds, "--", sys.executable, "-m", "tests.soak.chaos.first_process"]


def why_not_isolated() -> str:
    """The reason why namespaces or TUN devices cannot be used here, or nothing."""
    try:
        done = subprocess.run([*isolate_command(), "--try"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def start_isolated(module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """`python -m module arguments` as the only program of its namespaces; it ends with this process."""
    return subprocess.Popen([*isolate_command(), module, *arguments], preexec_fn=_die_with_parent)


class Terminated(BaseException):
    """SIGTERM came."""


def wait_isolated(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. After Ctrl-C, which it sees too, it has a minute to report; SIGTERM ends it and all below at once."""
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    try:
        try:
            return process.wait()
        except KeyboardInterrupt:
            return process.wait(_END_S)
    except (KeyboardInterrupt, Terminated, subprocess.TimeoutExpired):
        return 130
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _terminated(signum: int, frame: object) -> None:
    raise Terminated


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
