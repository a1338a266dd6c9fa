"""Colour: on a terminal, never with NO_COLOR, never into a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mooncake_v0.metadata.store import open_store
from tests.servers import free_ports
from tests.unit.metadata.builders import ram, rpc_meta

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COMMANDS = [
    "validate broken.json",
    "validate good.json",
    "metadata ls sqlite:///keys.db",
    "metadata check sqlite:///keys.db",
    "status good.json --timeout 1",
    "doctor --only python-version",
    "launch prefill broken.json --model m --print",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base, other = sorted(free_ports(2))
    good = {"prefill_url": f"127.0.0.1:{base}", "decode_url": f"127.0.0.1:{base}", "metadata_server": "etcd://a:2379"}
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "broken.json").write_text(json.dumps({**good, "protocol": "smoke"}))
    store = open_store(f"sqlite:///{tmp_path}/keys.db")
    for entry in (ram(f"127.0.0.1:{other - 1}"), rpc_meta(f"127.0.0.1:{other - 1}")):
        store.put(entry.key, entry.value)
    store.close()
    return tmp_path


def at_a_terminal(command: str, folder: Path, **variables: str) -> str:
    terminal, end = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        # OSError: the command has ended
        with contextlib.suppress(OSError):
            while True:
                shown.append(os.read(terminal, 4096))

    reader = threading.Thread(target=read)
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_v0", *command.split()],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm-256color", **variables},
        stdin=end,
        stdout=end,
        stderr=end,
    )
    os.close(end)
    reader.start()
    process.wait(120)
    reader.join()
    os.close(terminal)
    return b"".join(shown).decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_gets_colour_unless_no_color_is_set(command: str, folder: Path) -> None:
    assert COLOUR.search(at_a_terminal(command, folder))
    without = at_a_terminal(command, folder, NO_COLOR="1")
    assert without.strip()
    assert COLOUR.findall(without) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_no_terminal_codes(command: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_v0", *command.split()],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "NO_COLOR"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
