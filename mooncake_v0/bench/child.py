"""A process of the benchmark and the talk with it: one JSON object a line, over an inherited socket.

The parent sends ``{"do": NAME, …}``; the child answers ``{"ok": …}`` or ``{"error": TEXT, "fix": TEXT}``, and may say
``{"event": …}`` before. Standard output and error of the child go to a log file: libraries print there. A child ends when
the parent closes the socket or dies. `Parent` is the child's side; `upstream_peer` has those few lines of its own,
because it runs in an environment without this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from mooncake_v0.errors import CouldNotCheckError, MooncakeV0Error

STOP_S = 10.0
_LINE_BYTES = 1 << 16
_FIX = "run it again with --folder DIR and see the logs there"

Answer = dict[str, Any]


class Child:
    """Started by the constructor; `stop` in every case. One conversation at a time."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._socket, theirs = socket.socketpair()
        self._received = b""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        theirs.close()

    def ask(self, do: str, timeout_s: float = 60.0, **arguments: Any) -> Any:
        """Send a command and return its result; CouldNotCheckError if the child fails, dies or is late."""
        self.tell(do, **arguments)
        return self.result(timeout_s)

    def tell(self, do: str, **arguments: Any) -> None:
        try:
            self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except OSError as error:
            raise self._ended(f"cannot be asked to {do}: {error.strerror}") from error

    def result(self, timeout_s: float = 60.0) -> Any:
        answer = self._read(timeout_s)
        if "error" in answer:
            raise CouldNotCheckError(f"{self.name}: {answer['error']}", fix=answer.get("fix") or _FIX)
        return answer["ok"]

    def wait_event(self, name: str, timeout_s: float = 60.0) -> None:
        """Until the child says that it has begun something that it will answer later."""
        answer = self._read(timeout_s)
        if answer.get("event") != name:
            raise CouldNotCheckError(f"{self.name} said {answer} instead of {name!r}")

    def stop(self) -> None:
        """Close the socket, then end the child's whole session when it does not end itself."""
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def _read(self, timeout_s: float) -> Answer:
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            self._socket.settimeout(max(0.001, until_s - time.monotonic()))
            try:
                data = self._socket.recv(_LINE_BYTES)
            except socket.timeout:
                raise self._ended(f"gave no answer within {timeout_s:.0f} s") from None
            except OSError as error:
                raise self._ended(f"broke off: {error.strerror}") from error
            if not data:
                raise self._ended("has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: Answer = json.loads(line)
        return answer

    def _ended(self, what: str) -> CouldNotCheckError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            what += f" (exit code {code})"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
        return CouldNotCheckError(f"{self.name} {what}; its log ends with:\n{tail}", fix=_FIX)


class Parent:
    """The child's side of the talk."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    def say(self, event: str) -> None:
        self._send({"event": event})

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Answer commands until the parent is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), self._socket.makefile("rb") as lines:
            for line in lines:
                command = json.loads(line)
                handler = handlers[command.pop("do")]
                try:
                    self._send({"ok": handler(**command)})
                except MooncakeV0Error as error:
                    self._send({"error": error.what, "fix": error.fix})

    def _send(self, answer: Answer) -> None:
        self._socket.sendall(json.dumps(answer).encode() + b"\n")
