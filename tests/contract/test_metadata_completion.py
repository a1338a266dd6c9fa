"""Keys are completed while they are typed, in a real bash on a terminal, with the script that we print."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.metadata.store import open_store

DEADLINE_S = 120.0
VALUES = {
    "mooncake/ram/node:one": b"of the port",
    "with blank": b"of the blank",
    "with/dollar$HOME": b"of dollar",
}


class Terminal:
    """An interactive bash that has read the completion script."""

    def __init__(self, folder: Path) -> None:
        command = folder / "mooncake-v0"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncake_v0 "$@"\n')
        command.chmod(0o755)
        env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PS1": "ready> ", "TERM": "dumb"}
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))  # so that no line is wrapped
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            start_new_session=True,
        )
        os.close(slave)
        self.read_until("ready> ")
        self.type('eval "$(mooncake-v0 completion bash)"; echo "has" read it\n')
        self.read_until("has read it")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, wanted: str, *, again: str = "") -> None:
        """Read on until this is shown, typing `again` now and then; what was shown before it is not looked at again."""
        shown, deadline = "", time.monotonic() + DEADLINE_S
        while wanted not in shown:
            assert time.monotonic() < deadline, f"{wanted!r} was not shown after {shown!r}"
            if select.select([self._master], [], [], 5.0)[0]:
                shown += os.read(self._master, 4096).decode("utf-8", "replace")
            else:
                self.type(again)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path)
    yield opened
    opened.close()


def test_bash_completes_keys_with_colons_blanks_and_dollars(terminal: Terminal) -> None:
    gateway = start_gateway_thread("memory:", is_private=False)
    store = open_store(gateway.url)
    for key, value in VALUES.items():
        store.put(key, value)

    for typed, rest, value in (
        ("moonc", "ake/ram/node:one", "of the port"),
        ("mooncake/ram/node:o", "ne", "of the port"),
        ("'with '", "blank", "of the blank"),
        ("with/d", "ollar\\$HOME", "of dollar"),
    ):
        terminal.type(f"mooncake-v0 metadata get {gateway.url} {typed}\t")
        terminal.read_until(rest, again="\t")
        terminal.type("\n")
        terminal.read_until(value)
    store.close()
    gateway.close()
