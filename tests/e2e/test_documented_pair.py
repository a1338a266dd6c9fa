"""The README as an operator types it: its commands start a pair, its request is answered, and the operating guide's
transcripts are what that pair shows. Only addresses, ports, the model and sizes are put in place.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.pin.processes import find_free_range
from tests.documents import ROOT, Block, blocks, commands, first_json, matches, normalised, transcripts
from tests.quick import QUICK_START
from tests.servers import free_ports, wait_until

README, OPERATING = ROOT / "README.md", ROOT / "docs" / "operating.md"
DOCUMENTED_MODEL = "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"

pytestmark = [pytest.mark.pin, pytest.mark.timeout(420)]


@dataclass
class Operator:
    """Types commands in a folder. `places` maps what the README writes to what this host has."""

    folder: Path
    places: dict[str, str]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def adapt(self, text: str) -> str:
        return re.sub("|".join(map(re.escape, self.places)), lambda match: self.places[match[0]], text)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        as_on_two_hosts = {"MOONCAKE_V0_TRANSPORT": "engine"}
        return {**os.environ, "PATH": path, "NO_COLOR": "1", **QUICK_START, **as_on_two_hosts}

    def start(self, command: str, name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running.append(
                subprocess.Popen(
                    [
                        "bash",
                        "-c",
                        f"exec {self.adapt(command)}" if "=" not in command.split()[0] else self.adapt(command),
                    ],
                    cwd=self.folder,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def ask(self, command: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", self.adapt(command)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return (done.stdout + done.stderr).rstrip("\n").splitlines()

    def stop(self) -> None:
        for process in reversed(self.running):
            os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        for process in self.running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def is_healthy(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def knows_both(port: str) -> bool:
    """Whether the proxy has found both instances up; until then decode serves alone, and nothing is transferred."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return (
            len(re.findall(r'^mooncake_v0_proxy_instance_state\{.*state="up"\} 1', answer.read().decode(), re.M)) == 2
        )


def documented(language: str) -> list[Block]:
    return [block for block in blocks(README) if block.heading == "Start a pair" and block.language == language]


@pytest.fixture(scope="module")
def operator(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """A pair, started by the commands of "Start a pair" in their order."""
    folder = tmp_path_factory.mktemp("operator")
    metadata, prefill, decode, proxy = map(str, free_ports(4))
    places = {
        # on one host both URLs are equal, so that decode takes the port + 100
        "192.168.0.137:13003": f"127.0.0.1:{find_free_range(150)}",
        "192.168.0.137": "127.0.0.1",
        "192.168.0.139": "127.0.0.1",
        "8080": metadata,
        "8100": prefill,
        "8200": decode,
        "8000": proxy,
        DOCUMENTED_MODEL: tiny_model,
        "10000": "4096 --dtype float32",
        "2e9": "2e8",
        "1000": "16",
    }
    places["192.168.0.139:13003"] = places["192.168.0.137:13003"]
    made = Operator(folder, dict(sorted(places.items(), key=lambda item: -len(item[0]))))
    (folder / "mooncake.json").write_text(made.adapt(first_json(README)))
    (folder / "bin").mkdir()
    for name, module in (("mooncake-v0", "-m mooncake_v0 "), ("python3", "")):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (folder / "bin" / name).chmod(0o755)
    lines = [command for block in documented("bash") for command in commands(block)]
    with ExitStack() as stack:
        stack.callback(made.stop)
        for name, line in zip(("metadata", "prefill", "decode", "proxy"), lines):
            made.start(line, name)
        for port in (metadata, prefill, decode, proxy):
            wait_until(lambda port=port: is_healthy(port), f"/health at port {port}", 300)  # type: ignore[misc]
        wait_until(lambda: knows_both(proxy), "both instances at the proxy", 60)
        yield made


def test_the_documented_commands_serve_the_documented_request(operator: Operator) -> None:
    curl = commands(documented("bash")[4])[0]
    assert curl.startswith("curl")
    answer = "\n".join(operator.ask(curl))
    assert '"object":"text_completion"' in answer
    assert '"finish_reason"' in answer


def without_loopback(lines: list[str]) -> list[str]:
    """The lines without the notes that this pair has loopback addresses, each with its fix on the next line."""
    notes = [number for number, line in enumerate(lines) if "[metadata-loopback-published]" in line]
    return [line for number, line in enumerate(lines) if number not in notes and number - 1 not in notes]


SHOWN = [t for t in transcripts(OPERATING) if t.block.heading == "A running pair"]


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_a_transcript_of_the_running_pair_is_what_it_shows(operator: Operator, number: int) -> None:
    """Numbers, epochs and widths aside. Counters come a moment after the answer, so it may be asked again."""
    shown = tuple(map(normalised, map(operator.adapt, SHOWN[number].output)))
    deadline = time.monotonic() + 60
    while not matches(shown, real := list(map(normalised, without_loopback(operator.ask(SHOWN[number].command))))):
        assert time.monotonic() < deadline, f"shown:\n{shown}\nreal:\n{real}"
        time.sleep(0.5)


def test_decode_skipped_the_prefill(operator: Operator) -> None:
    status = "\n".join(operator.ask(commands(documented("bash")[5])[0]))
    assert "100 %" in status
    assert status.endswith("the pair is connected")


def test_doctor_finds_nothing_wrong_while_the_pair_runs(operator: Operator) -> None:
    """Ports and memory that the pair itself has are no trouble; other programs' doings on this host are not asked."""
    printed = "\n".join(operator.ask("mooncake-v0 doctor mooncake.json"))
    assert "prefill runs here, and its agents answer [running-instance]" in printed
    assert "decode runs here, and its agents answer [running-instance]" in printed
    assert "online-port-busy" not in printed
    assert "\n0 errors, " in printed, printed


def test_no_port_of_the_pair_is_open_to_other_hosts_but_the_engines(operator: Operator) -> None:
    """The side channel listens on the configured address alone; only the engine's data port is on all of them."""
    base = int(operator.places["192.168.0.137:13003"].split(":")[1])
    with socket.socket() as elsewhere:
        elsewhere.settimeout(2)
        assert elsewhere.connect_ex(("127.0.0.2", base + 32)) != 0
