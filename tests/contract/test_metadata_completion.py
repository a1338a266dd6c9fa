"""Keys are completed while they are typed, in real shells, with the script that we print for each."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
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
    "with,comma": b"of the comma",
}


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ""),
    "zsh": (["zsh", "-f", "-i"], "PS1='ready> '; autoload -Uz compinit; compinit -u -D; "),
}


def environment(folder: Path) -> dict[str, str]:
    """With mooncake-v0 on the path, and nothing of the user's own settings."""
    command = folder / "mooncake-v0"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncake_v0 "$@"\n')
    command.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PS1": "ready> ", "TERM": "dumb", "HOME": str(folder)}


class Terminal:
    """An interactive shell that has read the completion script."""

    def __init__(self, shell: str, folder: Path) -> None:
        command, before = SHELLS[shell]
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 500, 0, 0))  # so that no line is wrapped
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(folder),
            start_new_session=True,
        )
        os.close(slave)
        self.type(f'{before}eval "$(mooncake-v0 completion {shell})"; echo "has" read it\n')
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
def url() -> Iterator[str]:
    gateway = start_gateway_thread("memory:", is_private=False)
    store = open_store(gateway.url)
    for key, value in VALUES.items():
        store.put(key, value)
    store.close()
    yield gateway.url
    gateway.close()


def require(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"this machine has no {shell}")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_keys_with_colons_blanks_and_dollars(shell: str, url: str, tmp_path: Path) -> None:
    require(shell)
    terminal = Terminal(shell, tmp_path)
    try:
        for typed, rest, value in (
            ("moonc", "ake/ram/node:one", "of the port"),
            ("mooncake/ram/node:o", "ne", "of the port"),
            ("'with '", "blank", "of the blank"),
            ("with/d", "ollar\\$HOME", "of dollar"),
            ("with,", "comma", "of the comma"),
        ):
            terminal.type(f"mooncake-v0 metadata get {url} {typed}\t")
            terminal.read_until(rest, again="\t")
            terminal.type("\n")
            terminal.read_until(value)
    finally:
        terminal.close()


FISH = """
mooncake-v0 completion fish | source
for typed in $argv[2..]
    complete --do-complete "mooncake-v0 metadata get $argv[1] $typed"
end
"""


def test_fish_completes_keys_with_colons_blanks_and_dollars(url: str, tmp_path: Path) -> None:
    require("fish")
    typed = ("moonc", "mooncake/ram/node:o", "'with ", "with/d", "with,")
    done = subprocess.run(
        ["fish", "--no-config", "-c", FISH, url, *typed],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
    port, blank, dollar, comma = VALUES
    assert found == [port, port, blank, dollar, comma], done.stderr


@pytest.mark.parametrize(
    ("typed", "word", "text"),
    [
        ("doctor --bun", "--bundle", "Write a .tar.gz for support, masked."),
        ("metadata l", "ls", "List the segments: who is registered, and..."),
    ],
)
def test_fish_shows_what_a_word_means(typed: str, word: str, text: str, tmp_path: Path) -> None:
    require("fish")
    ask = f"mooncake-v0 completion fish | source; complete --do-complete 'mooncake-v0 {typed}'"
    command = ["fish", "--no-config", "-c", ask]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == f"{word}\t{text}\n", done.stderr
