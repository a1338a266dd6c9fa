"""What the operating guide shows of two hosts, on two hosts that have the documented addresses: namespaces with a cable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Iterator, Sequence

import pytest

from mooncake_v0.metadata.archive import export_lines
from mooncake_v0.metadata.registry import InstanceRecord
from tests.documents import ROOT, Transcript, first_json, matches, transcripts
from tests.servers import wait_until
from tests.two_hosts import blocked, inside, two_hosts
from tests.unit.metadata.builders import entry_of, ram, record, rpc_meta

OPERATING = ROOT / "docs" / "operating.md"
PREFILL, DECODE = "192.168.0.137", "192.168.0.139"
DEAD = f"{DECODE}:13003"


def shown(heading: str) -> list[Transcript]:
    return [item for item in transcripts(OPERATING) if item.block.heading == heading]


@dataclass(frozen=True)
class Hosts:
    """Both hosts of the README, with its mooncake.json."""

    names: dict[str, str]
    folder: Path

    def start(self, side: str, command: str) -> subprocess.Popen[str]:
        """Type a command on that host."""
        environment = {**os.environ, "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "NO_COLOR": "1"}
        environment["PYTHONUNBUFFERED"] = "1"
        return subprocess.Popen(
            [*inside(self.names[side]), "bash", "-c", command],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def assert_prints(self, side: str, wanted: Transcript) -> None:
        printed, _ = self.start(side, wanted.command).communicate(timeout=120)
        assert matches(wanted.output, printed.rstrip("\n").splitlines()), printed


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts({"prefill": PREFILL, "decode": DECODE}) as names:
        folder = tmp_path_factory.mktemp("hosts")
        (folder / "mooncake.json").write_text(first_json(ROOT / "README.md"))
        (folder / "bin").mkdir()
        command = folder / "bin" / "mooncake-v0"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncake_v0 "$@"\n')
        command.chmod(0o755)
        yield Hosts(names, folder)


def read_lines(output: IO[str] | None, wanted: Sequence[str]) -> None:
    """The next lines of a command that goes on."""
    assert output is not None
    printed = [output.readline().rstrip("\n") for _ in wanted]
    assert matches(tuple(wanted), printed), printed


def test_doctor_at_both_ends_finds_the_port_that_a_firewall_keeps(hosts: Hosts) -> None:
    answering, asking, opened = shown("The firewalls, from both hosts")
    with hosts.start("prefill", answering.command) as peer:
        try:
            read_lines(peer.stdout, answering.output[:2])
            with blocked(hosts.names["prefill"], 13004):
                hosts.assert_prints("decode", asking)
            hosts.assert_prints("decode", opened)
            read_lines(peer.stdout, answering.output[2:])
        finally:
            peer.terminate()


def test_the_rules_that_doctor_names_are_those_of_the_guide(hosts: Hosts) -> None:
    (command,) = {
        line.split("run: ")[1]
        for item in shown("The firewalls, from both hosts")[1:2]
        for line in item.output
        if "run: " in line
    }
    printed, _ = hosts.start("decode", command).communicate(timeout=60)
    assert f"-s {DECODE}" in printed and "13004" in printed


# --- keys of a dead instance ------------------------------------------------------------------------------------------


@contextmanager
def metadata_server(hosts: Hosts) -> Iterator[None]:
    """The README's, on decode's host."""
    with hosts.start("decode", f"exec mooncake-v0 metadata serve --host {DECODE} --port 8080") as server:
        try:
            assert server.stdout is not None
            assert any("/metadata" in line for line in iter(server.stdout.readline, ""))
            yield
        finally:
            server.terminate()


def publish_dead_decode(hosts: Hosts) -> None:
    """What decode leaves behind when its host loses its power: the keys of the engine and of the agent."""
    known: InstanceRecord = replace(record(DEAD, seen_ago_s=3600), role="decode", hostname="decode-host")
    entries = (entry_of(known), rpc_meta(DEAD), ram(DEAD))
    (hosts.folder / "dead.jsonl").write_text("".join(f"{line}\n" for line in export_lines(entries)))
    assert hosts.start("decode", "mooncake-v0 metadata import mooncake.json dead.jsonl").wait(60) == 0


def watchers(hosts: Hosts) -> int:
    page, _ = hosts.start("decode", f"curl -s http://{DECODE}:8080/metrics").communicate(timeout=60)
    found = re.search(r"^mooncake_metadata_watchers (\d+)", page, re.M)
    return int(found[1]) if found else 0


def test_the_keys_of_a_dead_instance_are_found_and_removed(hosts: Hosts) -> None:
    check, watch, dry, prune, again = shown("Keys of the dead")
    with metadata_server(hosts):
        publish_dead_decode(hosts)
        hosts.assert_prints("decode", check)
        hosts.assert_prints("decode", dry)
        with hosts.start("decode", watch.command) as other_terminal:
            try:
                wait_until(lambda: watchers(hosts), "the watch", 60)
                hosts.assert_prints("prefill", prune)
                read_lines(other_terminal.stdout, watch.output)
            finally:
                other_terminal.terminate()
        hosts.assert_prints("prefill", again)
