"""A command that waits for somebody who never answers: it says so at a terminal, and Ctrl-C ends it at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.pin.processes import find_free_range

WAITING_S = 60.0  # as long as the commands may wait
AT_ONCE_S = 25.0  # for a busy machine; well below WAITING_S


class Silent:
    """Accepts every connection at a port and says nothing."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port))
        self.asked = threading.Event()
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._connections.append(self._listener.accept()[0])
            except OSError:
                return
            self.asked.set()

    def close(self) -> None:
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
    made = {"side channel": Silent(base + 32), "metadata": Silent(base + 150)}
    yield made
    for one in made.values():
        one.close()


@pytest.mark.parametrize(
    ("command", "whom"),
    [
        ("status mooncake.json --timeout 60", "side channel"),
        ("validate mooncake.json --online --timeout 60", "metadata"),
        ("doctor mooncake.json --timeout 60", "metadata"),
        ("metadata ls mooncake.json", "metadata"),
    ],
)
def test_ctrl_c_ends_a_command_that_waits(command: str, whom: str, silent: dict[str, Silent], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_v0", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert silent[whom].asked.wait(WAITING_S)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        printed, errors = process.communicate(timeout=2 * WAITING_S)
        took_s = time.monotonic() - started
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in printed + errors
    assert process.returncode == 130, errors
    assert took_s < AT_ONCE_S


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
