"""The ports between two hosts: two network namespaces with a real block between them, and real doctors at both ends."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator

import pytest

from mooncake_v0.doctor.peer import Answering, ask
from tests.servers import free_ports, wait_until
from tests.two_hosts import blocked, inside, ip, two_hosts

CONFIG = {
    "prefill_url": "10.213.7.1:13003",
    "decode_url": "10.213.7.2:13003",
    "metadata_server": "http://10.213.7.2:8080/metadata",
    "protocol": "tcp",
    "device_name": "",
}
HANDSHAKE, DATA, SIDE_CHANNEL = 13003, 13004, 13035


class Hosts:
    """Two network namespaces, prefill at 10.213.7.1 and decode at 10.213.7.2."""

    def __init__(self, names: dict[str, str], folder: Path) -> None:
        self.names = names
        self.folder = folder
        (folder / "mooncake.json").write_text(json.dumps(CONFIG))
        self.environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

    def command(self, side: str, *arguments: str) -> list[str]:
        words = [sys.executable, "-m", "mooncake_v0", "doctor", "mooncake.json", "--timeout", "0.7", *arguments]
        return [*inside(self.names[side]), *words]

    def doctor(self, side: str) -> dict[str, Any]:
        """Check name -> its outcomes, of the two checks that need the other host."""
        arguments = ("--only", "peer-firewall", "--only", "peer-clock", "--format", "json")
        done = subprocess.run(
            self.command(side, *arguments), cwd=self.folder, env=self.environment, capture_output=True, timeout=60
        )
        found: dict[str, Any] = {}
        for row in json.loads(done.stdout)["results"]:
            found.setdefault(row["check"], []).append(row)
        return found


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts({"prefill": "10.213.7.1", "decode": "10.213.7.2"}) as names:
        yield Hosts(names, tmp_path_factory.mktemp("hosts"))


@contextmanager
def answering_at_prefill(hosts: Hosts, **variables: str) -> Iterator[None]:
    """`doctor --peer` on the prefill host."""
    with subprocess.Popen(
        hosts.command("prefill", "--peer"),
        cwd=hosts.folder,
        env={**hosts.environment, "PYTHONUNBUFFERED": "1", **variables},
        stdout=subprocess.PIPE,
    ) as peer:
        assert peer.stdout is not None
        try:
            assert f"{HANDSHAKE}, {DATA}, {SIDE_CHANNEL}" in peer.stdout.readline().decode()
            yield
        finally:
            peer.terminate()


@pytest.fixture
def prefill_answers(hosts: Hosts) -> Iterator[None]:
    with answering_at_prefill(hosts):
        yield


def test_open_ports_are_right_in_both_directions(hosts: Hosts, prefill_answers: None) -> None:
    found = hosts.doctor("decode")
    assert [row["status"] for row in found["peer-firewall"]] == ["ok", "ok"]
    assert found["peer-clock"][0]["status"] == "ok"


def test_a_blocked_port_of_prefill_is_an_error_with_the_rules_that_open_it(hosts: Hosts, prefill_answers: None) -> None:
    with blocked(hosts.names["prefill"], DATA):
        there, back = hosts.doctor("decode")["peer-firewall"]
    assert there["status"] == "error"
    assert there["what"] == f"port {DATA} of 10.213.7.1 cannot be reached: a firewall is between"
    assert there["command"].startswith("mooncake-v0 ports mooncake.json --tp 1 --firewall iptables")
    assert back["status"] == "ok"


def test_a_blocked_port_of_decode_is_a_note_since_nobody_connects_there(hosts: Hosts, prefill_answers: None) -> None:
    with blocked(hosts.names["decode"], SIDE_CHANNEL):
        there, back = hosts.doctor("decode")["peer-firewall"]
    assert there["status"] == "ok"
    assert (back["status"], back["evidence"]) == ("info", "listening: 13003, 13004; silent: 13035")


def test_a_host_without_a_doctor_gets_the_command_for_one(hosts: Hosts) -> None:
    (found,) = hosts.doctor("decode")["peer-firewall"]
    assert found["status"] == "info"
    assert found["command"] == "mooncake-v0 doctor mooncake.json --peer"


def test_a_host_that_is_down_is_an_error(hosts: Hosts) -> None:
    ip("-n", hosts.names["prefill"], "link", "set", "wire", "down")
    try:
        (found,) = hosts.doctor("decode")["peer-firewall"]
    finally:
        ip("-n", hosts.names["prefill"], "link", "set", "wire", "up")
    assert found["status"] == "error"
    assert found["what"] == "10.213.7.1 does not answer at any port"
    assert found["command"] == "ping -c 3 10.213.7.1"


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *out) {
    int code = ((int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime"))(clock, out);
    if (!code && clock == CLOCK_REALTIME) out->tv_sec += 300;
    return code;
}
"""


def test_a_clock_that_runs_ahead_on_the_other_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    """The other doctor's C library tells it a time five minutes ahead."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "clock.so", "clock.c"], cwd=tmp_path, check=True, timeout=60)
    with answering_at_prefill(hosts, LD_PRELOAD=str(tmp_path / "clock.so")):
        (found,) = hosts.doctor("decode")["peer-clock"]
    assert found["status"] == "warning"
    # as exact as a busy machine's answer is quick
    assert re.fullmatch(
        r"the other host's clock is 3\d\d s ahead|the other host's clock is 29\d s ahead", found["what"]
    )
    assert found["command"] == "timedatectl set-ntp true"


# --- the two ends on loopback -----------------------------------------------------------------------------------------


@pytest.fixture
def answering() -> Iterator[Answering]:
    ports = free_ports(4)
    peer = Answering("prefill", "127.0.0.1", ports[:2], ports[2:], timeout_s=0.5)
    listens, stop = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=peer.serve, args=(lambda free, taken: listens.set(), lambda source: None, lambda: not stop.is_set())
    )
    thread.start()
    wait_until(listens.is_set, "the peer listens")
    yield peer
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_peer_answers_strangers_nothing_and_stays_there(answering: Answering) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 9000, b'{"mooncake_v0_doctor": 2}\n'):
        with socket.create_connection(("127.0.0.1", answering.ports[0]), 5) as stranger:
            stranger.settimeout(5)
            with suppress(OSError):  # it closed with our bytes unread, perhaps before we say our end
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    asked = ask("127.0.0.1", answering.ports, "127.0.0.1", answering.may_ask, 0.5)
    assert set(asked.states.values()) == {"answered"}
    assert asked.reached == {port: "listening" for port in answering.may_ask}
    assert asked.clock_offset_s is not None
    assert abs(asked.clock_offset_s) < 3
