"""Ctrl-C ends every command at once and cleanly; one that waits says at a terminal what for."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import click
import psutil
import pytest

from mooncake_v0.metadata.archive import export_lines
from mooncake_v0.metadata.store import Entry
from mooncake_v0.pin.processes import find_free_range
from tests.reference import commands
from tests.servers import wait_until
from tests.unit.cli.test_launch import MODEL_CONFIG

START_S = 180.0  # for a busy machine: vLLM and torch are imported
END_S = 50.0  # below the 60 s that the commands would go on for by themselves
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Silent:
    """Accepts every connection at a port and says nothing, or never anything whole: an endless line, byte by byte."""

    def __init__(self, port: int, *, drips: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.asked = threading.Event()
        self._closed = threading.Event()
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()
        if drips:
            threading.Thread(target=self._drip, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
                self._connections.append(connection)
                if connection.recv(1):
                    self.asked.set()
            except OSError:
                return

    def _drip(self) -> None:
        while not self._closed.wait(0.5):
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.sendall(b"H")

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[dict[str, Silent]]:
    """Prefill's side channel and a metadata server, which never answer; their mooncake.json is in tmp_path."""
    base = find_free_range(200)
    config = {"prefill_url": f"127.0.0.1:{base}", "decode_url": f"127.0.0.1:{base + 50}"}
    config["metadata_server"] = f"http://127.0.0.1:{base + 150}/metadata"
    (tmp_path / "mooncake.json").write_text(json.dumps(config))
    made = {"side channel": Silent(base + 32), "metadata": Silent(base + 150, drips=True)}
    yield made
    for one in made.values():
        one.close()


class Running:
    """A command whose terminal we are; what it starts carries a mark in its environment."""

    def __init__(self, words: list[str], folder: Path, *, full_pipe: bool) -> None:
        self._mark = uuid.uuid4().hex
        self.printed = ""
        self._terminal, end = os.openpty()
        self._pipe = full_pipe_ends() if full_pipe else None
        command = [sys.executable, "-c", TAKE_TERMINAL, sys.executable, "-m", "mooncake_v0", *words]
        environment = {**os.environ, "INTERRUPT_TEST": self._mark, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        environment["PYTHONFAULTHANDLER"] = "1"
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=end,
            stdout=self._pipe[1] if self._pipe else end,
            stderr=end,
            start_new_session=True,
        )
        os.close(end)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # OSError: the last process with this terminal has ended
        with contextlib.suppress(OSError):
            while True:
                self.printed += os.read(self._terminal, 4096).decode("utf-8", "replace")

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def marked(self) -> list[psutil.Process]:
        """All processes that came of this command, whoever their parent is by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("INTERRUPT_TEST") == self._mark:
                    found.append(process)
        return found

    def waits(self) -> bool:
        """Its main thread is in a system call: poll, futex, …"""
        return Path(f"/proc/{self.process.pid}/syscall").read_text() != "running\n"

    def is_stuck_in_its_output(self) -> bool:
        """Blocked in write(1, …): its reader takes no more."""
        return Path(f"/proc/{self.process.pid}/syscall").read_text().startswith("1 0x1 ")

    def close(self) -> None:
        for process in self.marked():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        self._reader.join()
        for descriptor in (self._terminal, *(self._pipe or ())):
            os.close(descriptor)


def full_pipe_ends() -> tuple[int, int]:
    """A pipe that takes not one byte more, as that of a pager which waits for a key."""
    reader, writer = os.pipe()
    flags = fcntl.fcntl(writer, fcntl.F_GETFL)
    fcntl.fcntl(writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    for size in (4096, 1):
        try:
            while True:
                os.write(writer, b"x" * size)
        except OSError as error:
            assert error.errno == errno.EAGAIN
    fcntl.fcntl(writer, fcntl.F_SETFL, flags)
    return reader, writer


class Case(NamedTuple):
    """A command line, when to press Ctrl-C, and the exit code."""

    words: str
    when: Callable[[Running, dict[str, Silent]], bool]
    exit_code: int = 130
    full_pipe: bool = False


def asks(whom: str) -> Callable[[Running, dict[str, Silent]], bool]:
    return lambda running, silent: silent[whom].asked.is_set() and running.waits()


def prints(text: str) -> Callable[[Running, dict[str, Silent]], bool]:
    return lambda running, silent: text in running.printed


def starts(word: str, count: int) -> Callable[[Running, dict[str, Silent]], bool]:
    """So many processes with this word in their command line run."""

    def has_started(running: Running, silent: dict[str, Silent]) -> bool:
        lines = []
        for process in running.marked():
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
        return sum(word in line for line in lines) >= count

    return has_started


def writes(words: str) -> Case:
    """For a command that waits for nobody but the reader of its output."""
    return Case(words, lambda running, silent: running.is_stuck_in_its_output(), full_pipe=True)


CASES = {
    "bench serve": Case("bench serve --start tiny --prompt-tokens 128", starts("api_server", 1)),
    "bench transfer": Case("bench transfer --kv-bytes 1MiB", starts("mooncake_v0.bench", 1)),
    "completion": writes("completion zsh"),
    "demo": Case("demo", starts("api_server", 1)),
    "doctor": Case("doctor mooncake.json --timeout 60", asks("metadata")),
    "explain": writes("explain"),
    "launch": Case("launch pair good.json --model model --serve-metadata", starts("api_server", 2)),
    "metadata check": Case("metadata check mooncake.json", asks("metadata")),
    "metadata export": Case("metadata export mooncake.json", asks("metadata")),
    "metadata get": Case("metadata get mooncake.json key", asks("metadata")),
    "metadata import": Case("metadata import mooncake.json keys.jsonl", asks("metadata")),
    "metadata ls": Case("metadata ls mooncake.json", asks("metadata")),
    "metadata prune": Case("metadata prune mooncake.json", asks("metadata")),
    "metadata put": Case("metadata put mooncake.json key value", asks("metadata")),
    "metadata rm": Case("metadata rm mooncake.json key", asks("metadata")),
    "metadata serve": Case("metadata serve --port 0", prints("http://"), exit_code=0),
    "metadata watch": Case("metadata watch mooncake.json", asks("metadata")),
    "migrate": writes("migrate start.sh"),
    "ports": writes("ports good.json"),
    "proxy": Case("proxy --port 0 --prefill http://127.0.0.1:1 --decode http://127.0.0.1:2", prints("on http://"), 0),
    "schema": writes("schema"),
    "size": writes("size --model model --prompt-tokens 8000"),
    "status": Case("status mooncake.json --timeout 60", asks("side channel")),
    "validate": Case("validate mooncake.json --online --timeout 60", asks("metadata")),
}

ON_VLLM = ("bench serve", "bench transfer", "demo", "launch")


def test_every_command_has_its_case() -> None:
    names = {path.partition(" ")[2] for path, command in commands() if not isinstance(command, click.Group)}
    assert names == set(CASES)


@pytest.fixture
def folder(tmp_path: Path, silent: dict[str, Silent]) -> Path:
    """What the cases name."""
    base = find_free_range(300)
    good = {"prefill_url": f"127.0.0.1:{base}", "decode_url": f"127.0.0.1:{base + 100}"}
    good["metadata_server"] = f"http://127.0.0.1:{base + 250}/metadata"
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "keys.jsonl").write_text("".join(f"{line}\n" for line in export_lines([Entry("a", b"1")])))
    (tmp_path / "start.sh").write_text("python3 -m vllm.entrypoints.openai.api_server --model m --port 8100\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return tmp_path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.pin] if name in ON_VLLM else []) for name in CASES]
)
def test_ctrl_c_at_the_terminal_ends_a_command_and_all_that_it_started(
    name: str, folder: Path, silent: dict[str, Silent]
) -> None:
    case = CASES[name]
    running = Running(case.words.split(), folder, full_pipe=case.full_pipe)
    try:
        wait_until(lambda: running.process.poll() is not None or case.when(running, silent), f"{name} at work", START_S)
        assert running.process.poll() is None, running.printed
        running.press_ctrl_c()
        try:
            code = running.process.wait(END_S)
        except subprocess.TimeoutExpired:
            running.process.send_signal(signal.SIGABRT)  # prints where it is
            code = running.process.wait()
        wait_until(lambda: not running.marked(), f"the end of what {name} started")
    finally:
        running.close()
    assert "Traceback" not in running.printed, running.printed
    assert code == case.exit_code, running.printed


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("status mooncake.json --timeout 60", b"waiting for the agents"),
        ("validate mooncake.json --online --timeout 60", b"waiting for the metadata server"),
        ("doctor mooncake.json --timeout 60", b"looking at the configuration"),
    ],
)
def test_a_terminal_shows_what_a_command_waits_for(
    command: str, words: bytes, silent: dict[str, Silent], tmp_path: Path
) -> None:
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_v0", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"},
        stdout=subprocess.DEVNULL,
        stderr=end,
    )
    os.close(end)
    try:
        shown = b""
        while words not in shown:
            shown += os.read(terminal, 4096)  # OSError when the command has ended without the words
        # the cursor is hidden meanwhile; but nothing is coloured
        assert b"\x1b[3" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
