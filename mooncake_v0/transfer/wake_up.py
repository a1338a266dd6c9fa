"""Lets a thread wake the agent's main loop, which polls descriptors."""

from __future__ import annotations

import contextlib
import socket


class WakeUp:
    """set() from any thread makes `fileno` readable until clear()."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the receiver has unread wake-ups already
            self._sender.send(b"x")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass
