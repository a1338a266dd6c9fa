"""Runs the commands of `mooncake-v0 launch` until one ends or a signal comes, and ends the others.

Every child has a session of its own, so Ctrl-C at the terminal reaches only this process, which passes it on: SIGTERM to
each child, newest first, SIGKILL to its session when it does not end. A second signal kills at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import Callable, Iterator, Sequence

from mooncake_v0.cli.launch_commands import Command
from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.pin.processes import ManagedProcess

POLL_S = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Say = Callable[[str], None]


class Stopped(Exception):
    """A signal asked us to end."""


class Runner:
    """`with Runner(...) as runner: runner.start(stage) for each stage; runner.wait()`. Leaving ends every child.

    log: the file that a command's output goes to; None leaves it on our own output.
    """

    def __init__(self, log: Callable[[Command], Path | None], say: Say) -> None:
        self._log = log
        self._say = say
        self._children: list[ManagedProcess] = []
        self.signal: int | None = None

    def __enter__(self) -> Runner:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for child in reversed(self._children):
            child.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
            return
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    def start(self, commands: Sequence[Command], timeout_s: float, progress: Callable[[str, float], None]) -> None:
        """Start these at once and wait until all of them serve. Raises CouldNotCheckError if one ends or is late."""
        started = time.monotonic()
        waiting = [self._start(command) for command in commands]
        while waiting:
            self._check_all()
            elapsed_s = time.monotonic() - started
            for child in [child for child in waiting if child.is_ready()]:
                waiting.remove(child)
                self._say(f"{child.name} serves after {elapsed_s:.0f} s: {child.ready_url.rpartition('/')[0]}")
            if waiting and elapsed_s > timeout_s:
                raise _failure(waiting[0], f"does not serve after {timeout_s:.0f} s")
            if waiting:
                progress(" and ".join(child.name for child in waiting), elapsed_s)
                time.sleep(POLL_S)

    def wait(self) -> None:
        """Until a child ends (CouldNotCheckError) or a signal comes (Stopped)."""
        while True:
            self._check_all()
            time.sleep(POLL_S)

    def _check_all(self) -> None:
        if self.signal is not None:
            raise Stopped
        for child in self._children:
            code = child.popen.poll()
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
                raise _failure(child, f"has ended with {how}")

    def _start(self, command: Command) -> ManagedProcess:
        log = self._log(command)
        environment = {**os.environ, **command.environment}
        environment.pop("NOTIFY_SOCKET", None)  # only this process reports to systemd
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("ab"))
            popen = subprocess.Popen(
                command.words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        child = ManagedProcess(command.name, popen, log or Path(os.devnull), command.ready_url)
        self._children.append(child)
        return child


def _failure(child: ManagedProcess, what: str) -> CouldNotCheckError:
    has_log = child.log != Path(os.devnull)
    tail = f":\n{child.log_tail()}" if has_log else ""
    where = f"the whole log is in {child.log}" if has_log else "its own messages are above"
    return CouldNotCheckError(f"{child.name} {what}{tail}", fix=f"{where}; `mooncake-v0 doctor` checks this host")


@contextlib.contextmanager
def pid_file(path: Path | None) -> Iterator[None]:
    """Our pid in a file while we run. Raises CouldNotCheckError if a living process has it already."""
    if path is None:
        yield
        return
    if _is_alive(path):
        raise CouldNotCheckError(
            f"{path} belongs to process {path.read_text().strip()}, which runs",
            fix=f"end it first: kill {path.read_text().strip()}",
        )
    path.write_text(f"{os.getpid()}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _is_alive(path: Path) -> bool:
    try:
        os.kill(int(path.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def notify_systemd(state: str) -> None:
    """Tell systemd (Type=notify) about readiness; nothing without it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out, contextlib.suppress(OSError):
            out.connect("\0" + address[1:] if address.startswith("@") else address)
            out.sendall(state.encode())
