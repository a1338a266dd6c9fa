"""What clients may do to one connection of the gateway, over real sockets: odd HTTP, slow, cut, half closed, greedy."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.metadata import gateway_connection
from mooncake_v0.metadata.gateway import GatewayThread, gateway_in_thread, start_gateway_thread
from mooncake_v0.metadata.gateway_server import GatewayOptions
from mooncake_v0.metadata.memory_store import MemoryStore
from mooncake_v0.metadata.store import open_store
from tests.contract.test_metadata_gateway import Http, port_of
from tests.servers import wait_until

KEY = "/metadata?key=a"
MIB = 1024 * 1024


@pytest.fixture(params=["memory", "sqlite"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """A gateway over a store that answers at once, and over one that answers from a thread."""
    url = "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/keys.db"
    gateway = start_gateway_thread(url, is_private=False)
    yield port_of(gateway)
    gateway.close()


@pytest.fixture
def http(port: int) -> Iterator[Http]:
    with closing(Http(port)) as connection:
        yield connection


def send(http: Http, text: str) -> None:
    http.socket.sendall(text.replace("\n", "\r\n").encode())


def test_answers_come_in_the_order_of_the_requests(http: Http) -> None:
    put = f"PUT {KEY} HTTP/1.1\nContent-Length: 1\n\n"
    send(
        http, f"{put}1GET {KEY} HTTP/1.1\n\n{put}2GET {KEY} HTTP/1.1\n\nDELETE {KEY} HTTP/1.1\n\nGET {KEY} HTTP/1.1\n\n"
    )

    answers = [http.answer() for _ in range(6)]

    assert [status for status, _ in answers] == [200, 200, 200, 200, 200, 404]
    assert (answers[1][1], answers[3][1]) == (b"1", b"2")


def test_a_request_that_comes_byte_by_byte_is_one_request(http: Http) -> None:
    http.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in f"PUT {KEY} HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".encode():
        http.socket.sendall(bytes([byte]))

    assert http.answer()[0] == 200
    assert http.ask("GET", KEY) == (200, b"abc")


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(http: Http) -> None:
    send(http, f"PUT {KEY} HTTP/1.1\nContent-Length: 3\nExpect: 100-continue\n\n")
    leave = (http.file.readline(), http.file.readline())
    send(http, "abc")

    assert leave == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
    assert http.answer()[0] == 200
    assert http.ask("GET", KEY) == (200, b"abc")


def test_leave_is_not_given_for_a_body_that_is_too_large(http: Http) -> None:
    send(http, f"PUT {KEY} HTTP/1.1\nContent-Length: {MIB + 1}\nExpect: 100-continue\n\n")

    assert http.answer()[0] == 413
    assert http.file.read() == b""


def test_a_refusal_can_be_read_by_a_client_that_goes_on_sending(http: Http) -> None:
    send(http, f"PUT {KEY} HTTP/1.1\nContent-Length: {8 * MIB}\n\n")
    http.socket.sendall(b"x" * 8 * MIB)

    assert http.answer()[0] == 413


def test_head_is_answered_without_a_body(http: Http) -> None:
    send(http, f"HEAD {KEY} HTTP/1.1\n\n")
    head = [http.file.readline()]
    while head[-1] != b"\r\n":
        head.append(http.file.readline())

    assert head[0].startswith(b"HTTP/1.1 405 ")
    assert http.ask("GET", KEY)[0] == 404


@pytest.mark.parametrize(
    "head",
    [
        "GET {} HTTP/1.0\n\n",
        "GET {} HTTP/1.1\nConnection: close\n\n",
        "GET {} HTTP/1.1\nUpgrade: h2c\nConnection: Upgrade\n\n",
    ],
)
def test_a_connection_that_is_not_kept_is_closed_after_the_answer(http: Http, head: str) -> None:
    send(http, head.format(KEY))

    assert http.answer()[0] == 404
    assert http.file.read() == b""


def test_a_client_that_has_ended_its_own_sending_is_answered(http: Http) -> None:
    send(http, f"PUT {KEY} HTTP/1.1\nContent-Length: 1\n\n1GET {KEY} HTTP/1.1\n\n")
    http.socket.shutdown(socket.SHUT_WR)

    assert (http.answer()[0], http.answer()) == (200, (200, b"1"))
    assert http.file.read() == b""


def test_a_body_that_stops_coming_is_given_up(http: Http, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_connection, "READ_BODY_S", 0.1)
    send(http, f"PUT {KEY} HTTP/1.1\nContent-Length: 3\n\nab")

    assert http.answer()[0] == 408
    assert http.file.read() == b""
    with closing(Http(port)) as other:
        assert other.ask("GET", KEY)[0] == 404


def test_a_refused_client_that_does_not_close_is_cut_off(
    http: Http, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_connection, "LINGER_S", 0.1)
    send(http, "nonsense\n\n")
    status = http.answer()[0]

    with closing(Http(port)) as other:
        wait_until(lambda: b"connections 1.0\n" in other.ask("GET", "/metrics")[1], "the end of the refused connection")
    assert status == 400


def test_a_client_that_asks_much_and_reads_nothing_costs_no_memory() -> None:
    command = [sys.executable, "-m", "mooncake_v0", "metadata", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline().split(":")[2].split("/")[0])
    value = b"x" * MIB
    with closing(Http(port)) as greedy, closing(Http(port)) as other:
        other.ask("PUT", KEY, value)
        before = _memory_mib(process.pid)
        send(greedy, f"GET {KEY} HTTP/1.1\n\n" * 200)
        greedy.socket.recv(1, socket.MSG_PEEK)  # the first answer is here, the rest waits
        served = other.ask("GET", "/health")[0]
        grown = _memory_mib(process.pid) - before
        answers = {greedy.answer() for _ in range(200)}
    process.terminate()
    process.wait(10)
    process.stdout.close()

    assert (served, answers) == (200, {(200, value)})
    assert grown < 32


def _memory_mib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) // 1024


def test_connections_and_watchers_are_counted_while_they_last(port: int) -> None:
    def shows(line: str) -> bool:
        return line.encode() in other.ask("GET", "/metrics")[1]

    with closing(Http(port)) as other:
        with closing(Http(port)) as watching:
            send(watching, "GET /metadata/watch?prefix=w HTTP/1.1\n\n")
            assert watching.file.readline() == b"HTTP/1.1 200 OK\r\n"
            wait_until(lambda: shows("mooncake_metadata_watchers 1.0\n"), "the watcher in the metrics")
            assert shows("mooncake_metadata_connections 2.0\n")
        wait_until(lambda: shows("mooncake_metadata_watchers 0.0\n"), "the end of the watcher")
        wait_until(lambda: shows("mooncake_metadata_connections 1.0\n"), "the end of its connection")


def test_a_watch_over_http_1_0_ends_with_its_connection(http: Http, port: int) -> None:
    send(http, "GET /metadata/watch?prefix=w HTTP/1.0\n\n")
    head = [http.file.readline()]
    while head[-1] != b"\r\n":
        head.append(http.file.readline())
    begun = http.file.readline()
    with closing(Http(port)) as other:
        other.ask("PUT", "/metadata?key=w1", b"1")

    assert b"Connection: close\r\n" in head and not any(b"chunked" in line for line in head)
    assert (begun, http.file.readline()) == (b"\n", b'{"kind": "put", "key": "w1", "value": "1"}\n')


class Faulty(MemoryStore):
    """A store with a fault in it."""

    def get(self, key: str) -> bytes | None:
        raise RuntimeError("a fault")


def test_a_fault_of_the_gateway_costs_one_request_and_leaves_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    gateway = gateway_in_thread(Faulty(), GatewayOptions())
    with closing(Http(port_of(gateway))) as http:
        statuses = [http.ask("GET", KEY)[0], http.ask("PUT", KEY, b"1")[0]]
    gateway.close()

    assert statuses == [500, 200]
    assert "RuntimeError: a fault" in caplog.text


def test_a_stop_closes_connections_that_ask_nothing(tmp_path: Path) -> None:
    gateway: GatewayThread = gateway_in_thread(open_store("memory:"), GatewayOptions())
    idle, silent = Http(port_of(gateway)), Http(port_of(gateway))
    wait_until(lambda: b"connections 2.0\n" in idle.ask("GET", "/metrics")[1], "both connections")
    gateway.close()

    assert (idle.file.read(), silent.file.read(), gateway.is_alive) == (b"", b"", False)
    idle.close()
    silent.close()
