"""The gateway's HTTP contract, its login, and its behaviour when stores and clients fail; raw sockets against it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import socket
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.metadata.gateway import GatewayThread, gateway_in_thread, start_gateway_thread
from mooncake_v0.metadata.gateway_auth import Access, read_access
from mooncake_v0.metadata.gateway_server import Gateway, GatewayOptions
from mooncake_v0.metadata.store import open_store
from tests import servers

KEY = "/metadata?key=mooncake%2Ftest%2F127.0.0.1%3A13003"
TOKEN = "t0ken-never-logged"


class Http:
    """One raw connection; `ask` sends a request and reads one answer."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.file = self.socket.makefile("rb")

    def ask(self, method: str, target: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        lines = [f"{method} {target} HTTP/1.1", "Host: x"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += [] if body is None else [f"Content-Length: {len(body)}"]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        return self.answer()

    def answer(self) -> tuple[int, bytes]:
        status = self.file.readline()
        assert status, "the gateway closed the connection"
        length = 0
        for line in iter(self.file.readline, b"\r\n"):
            name, _, value = line.decode().partition(":")
            length = int(value) if name.lower() == "content-length" else length
        return int(status.split()[1]), self.file.read(length)

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def port_of(gateway: GatewayThread) -> int:
    return int(gateway.masked_url.split(":")[2].split("/")[0])


@pytest.fixture
def gateway() -> Iterator[GatewayThread]:
    handle = start_gateway_thread("memory:", is_private=False)
    yield handle
    handle.close()


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[Http]:
    with closing(Http(port_of(gateway))) as connection:
        yield connection


def test_one_kept_connection_serves_the_engines_whole_life(http: Http) -> None:
    statuses = [
        http.ask("GET", KEY)[0],
        http.ask("PUT", KEY, b'{"a":1}\n', Content_Type="application/json")[0],
        http.ask("PUT", KEY, b'{"a":2}\n', Content_Type="application/json")[0],
        http.ask("GET", KEY),
        http.ask("DELETE", KEY)[0],
        http.ask("DELETE", KEY)[0],
    ]

    assert statuses == [404, 200, 200, (200, b'{"a":2}\n'), 200, 404]


def test_a_percent_encoded_key_is_stored_decoded(http: Http) -> None:
    http.ask("PUT", "/metadata?key=mooncake%2Fram%2Fwe%20ird%3A1%2Fx%2B%C3%A9%0D%0A%25", b"1")

    listed = json.loads(http.ask("GET", "/metadata/list?prefix=mooncake%2F")[1])
    assert listed == {"entries": [{"key": "mooncake/ram/we ird:1/x+é\r\n%", "value": "1"}]}


@pytest.mark.parametrize("path", ["/metadata", "/metadata/", "/"])
def test_the_key_is_found_under_every_path_that_people_write(http: Http, path: str) -> None:
    assert http.ask("PUT", path + "?key=a", b"1")[0] == 200
    assert http.ask("GET", "/metadata?key=a") == (200, b"1")


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/metadata", 400),
        ("GET", "/metadata?key=", 400),
        ("GET", "/metadata?key=%FF", 400),
        ("GET", "/metadata?key=" + "x" * 5000, 400),
        ("PUT", "/metadata?key=a&ttl=soon", 400),
        ("PUT", "/metadata?key=a&ttl=-1", 400),
        ("PUT", "/metadata?key=a&ttl=nan", 400),
        ("POST", "/metadata?key=a", 405),
        ("PUT", "/metadata/list", 405),
        ("GET", "/nothing", 404),
    ],
)
def test_a_wrong_request_gets_one_clear_error_and_keeps_its_connection(
    http: Http, method: str, target: str, status: int
) -> None:
    answer = http.ask(method, target, b"")

    assert answer[0] == status
    assert set(json.loads(answer[1])) == {"error", "fix"}
    assert http.ask("PUT", KEY, b"1")[0] == 200


def test_a_value_of_one_mebibyte_is_taken_and_one_byte_more_is_refused(http: Http, gateway: GatewayThread) -> None:
    assert http.ask("PUT", KEY, b"x" * 1024 * 1024)[0] == 200
    with closing(Http(port_of(gateway))) as other:
        status, body = other.ask("PUT", KEY, b"y" * (1024 * 1024 + 1))

    assert (status, "1048576" in body.decode()) == (413, True)
    assert http.ask("GET", KEY) == (200, b"x" * 1024 * 1024)


def test_a_chunked_body_is_read_and_bounded_too(gateway: GatewayThread) -> None:
    head = f"PUT {KEY} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with closing(Http(port_of(gateway))) as small, closing(Http(port_of(gateway))) as large:
        small.socket.sendall(head + b"3\r\nabc\r\n0\r\n\r\n")
        large.socket.sendall(head + b"200000\r\n" + b"x" * 0x200000 + b"\r\n0\r\n\r\n")

        assert small.answer()[0] == 200
        assert large.answer()[0] == 413


def test_a_request_cut_in_the_middle_writes_nothing(http: Http, gateway: GatewayThread) -> None:
    http.ask("PUT", KEY, b"old")
    with closing(Http(port_of(gateway))) as cut:
        cut.socket.sendall(f"PUT {KEY} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nnew".encode())

    assert http.ask("GET", KEY) == (200, b"old")


def test_two_requests_sent_at_once_are_answered_in_order(http: Http) -> None:
    http.ask("PUT", KEY, b"1")
    http.socket.sendall((f"GET {KEY} HTTP/1.1\r\nHost: x\r\n\r\nDELETE {KEY} HTTP/1.1\r\nHost: x\r\n\r\n").encode())

    assert (http.answer(), http.answer()[0]) == ((200, b"1"), 200)


def test_what_is_not_http_is_refused_and_hurts_nobody(http: Http, gateway: GatewayThread) -> None:
    with closing(Http(port_of(gateway))) as noise:
        noise.socket.sendall(b"\x16\x03\x01\x02\x00\x01 not http\r\n\r\n")
        status = noise.answer()[0]

    assert status == 400
    assert http.ask("GET", KEY)[0] == 404


async def test_silent_and_half_open_connections_are_closed_and_others_are_served() -> None:
    gateway = Gateway(open_store("memory:"), GatewayOptions(first_request_s=0.5))
    await gateway.start()
    held = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(100)]
    for _, writer in held[::2]:
        writer.write(b"GET /metadata?key=a HTTP/1.1\r\nHos")
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /metadata?key=a HTTP/1.1\r\nHost: x\r\n\r\n")
    served = await asyncio.wait_for(reader.readline(), 5)

    ended = await asyncio.wait_for(asyncio.gather(*(r.read() for r, _ in held)), 5)
    writer.write(b"GET /metadata?key=a HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")  # the connection that asked is still served
    await gateway.stop()
    for _, open_writer in [*held, (reader, writer)]:
        open_writer.close()

    assert served == b"HTTP/1.1 404 Not Found\r\n"
    assert ended == [b""] * 100


def test_keys_vanish_after_the_gateways_ttl_or_their_own() -> None:
    gateway = gateway_in_thread(open_store("memory:"), GatewayOptions(default_ttl_s=0.3))
    with closing(Http(port_of(gateway))) as http:
        http.ask("PUT", "/metadata?key=by-default", b"1")
        http.ask("PUT", "/metadata?key=longer&ttl=60", b"1")

        servers.wait_until(lambda: http.ask("GET", "/metadata?key=by-default")[0] == 404, "the expiry", 5)
        assert http.ask("GET", "/metadata?key=longer")[0] == 200
    gateway.close()


def test_health_makes_a_round_trip_and_leaves_nothing(http: Http) -> None:
    status, body = http.ask("GET", "/health")

    assert (status, json.loads(body)["status"]) == (200, "ok")
    assert json.loads(http.ask("GET", "/metadata/list?prefix=")[1]) == {"entries": []}


def test_metrics_count_requests_by_method_and_status_without_naming_keys(http: Http) -> None:
    http.ask("PUT", KEY, b"1")
    http.ask("GET", "/metadata?key=missing")

    text = http.ask("GET", "/metrics")[1].decode()
    assert 'mooncake_metadata_requests_total{method="PUT",status="200"} 1.0' in text
    assert 'mooncake_metadata_requests_total{method="GET",status="404"} 1.0' in text
    assert "mooncake_metadata_store_up 1.0" in text
    assert "13003" not in text and "missing" not in text


@pytest.mark.parametrize("value", [b"[]", b'{"buffers":3}', b'{"buffers":[{"addr":"x"}]}', b"nothing", b'{"name":1}'])
def test_a_value_that_would_make_the_engine_throw_is_kept_from_it(http: Http, value: bytes) -> None:
    engine_key = "/metadata?key=mooncake%2Fram%2F127.0.0.1%3A13003"
    http.ask("PUT", engine_key, b"{}")
    before = http.ask("GET", engine_key)[0]
    http.ask("PUT", engine_key, value)

    raw = http.ask("GET", engine_key + "&raw=1")
    status, body = http.ask("GET", engine_key)

    assert (before, raw) == (200, (200, value))
    assert (status, "corrupt" in body.decode()) == (422, True)


def test_a_delete_with_if_match_spares_a_value_that_changed(http: Http) -> None:
    http.ask("PUT", KEY, b"new")

    assert http.ask("DELETE", KEY, If_Match='"0000"')[0] == 412
    assert http.ask("GET", KEY) == (200, b"new")


def test_fifty_watchers_see_every_change(gateway: GatewayThread) -> None:
    store = open_store(gateway.url)
    watches = [store.watch("mooncake/") for _ in range(50)]

    for i in range(20):
        store.put(f"mooncake/{i}", b"1")
    seen = [[watch.next(5) for _ in range(20)] for watch in watches]
    for watch in watches:
        watch.close()
    store.close()

    assert all([c.key for c in changes if c] == [f"mooncake/{i}" for i in range(20)] for changes in seen)


def test_a_stop_answers_what_was_asked_and_ends_the_watches(tmp_path: Path) -> None:
    gateway = start_gateway_thread(f"sqlite:///{tmp_path}/keys.db", is_private=False)
    store = open_store(gateway.url)
    store.put("mooncake/a", b"1")
    watch = store.watch("mooncake/")
    http = Http(port_of(gateway))
    blocker = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # the PUT waits for this
    http.socket.sendall(f"PUT {KEY} HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n1".encode())
    stopping = threading.Thread(target=gateway.close)
    servers.wait_until(lambda: _waits(http), "the PUT's wait")
    stopping.start()
    blocker.execute("COMMIT")
    blocker.close()

    assert http.answer()[0] == 200
    stopping.join(10)
    with pytest.raises(Exception, match="watch .* was lost"):
        watch.next(5)
    assert not gateway.is_alive
    http.close()
    store.close()


def _waits(http: Http) -> bool:
    # half a second without an answer
    http.socket.settimeout(0.3)
    try:
        http.socket.recv(1, socket.MSG_PEEK)
    except socket.timeout:  # TimeoutError itself only since Python 3.10
        return True
    finally:
        http.socket.settimeout(10)
    return False


def test_two_gateways_over_one_store_behave_as_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"
    first, second = start_gateway_thread(url), start_gateway_thread(url)
    one, other = open_store(first.url), open_store(second.url)

    one.put("mooncake/a", b"1")
    seen = other.get("mooncake/a")
    other.put("mooncake/a", b"2")
    seen_back = one.get("mooncake/a")
    other.delete("mooncake/a")

    assert (seen, seen_back, one.get("mooncake/a")) == (b"1", b"2", None)
    for thing in (one, other, first, second):
        thing.close()


def test_a_writer_that_waits_does_not_hold_up_other_keys(tmp_path: Path) -> None:
    gateway = start_gateway_thread(f"sqlite:///{tmp_path}/keys.db", is_private=False, timeout_s=1.0)
    with closing(Http(port_of(gateway))) as blocked, closing(Http(port_of(gateway))) as other:
        blocked.ask("PUT", "/metadata?key=a", b"1")
        blocker = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        blocked.socket.sendall(b"PUT /metadata?key=a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n2")
        read = other.ask("GET", "/metadata?key=a")
        refused = blocked.answer()
        blocker.execute("COMMIT")
        blocker.close()

        assert read == (200, b"1")
        assert (refused[0], "locked" in refused[1].decode()) == (503, True)
        assert other.ask("PUT", "/metadata?key=a", b"3")[0] == 200
    gateway.close()


def test_a_stopped_store_costs_fast_503_and_one_log_line_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    redis = servers.start_redis(tmp_path)
    gateway = start_gateway_thread(redis.url, is_private=False, timeout_s=0.8, stale_reads=False)
    http = Http(port_of(gateway))
    http.ask("PUT", KEY, b"1")

    redis.pause()
    first = [http.ask("GET", KEY)[0] for _ in range(2)]
    started = time.monotonic()
    later = [http.ask("GET", KEY)[0] for _ in range(200)]
    took_s = time.monotonic() - started
    health = http.ask("GET", "/health")[0]
    redis.resume()
    servers.wait_until(lambda: http.ask("GET", KEY) == (200, b"1"), "recovery", 10)

    assert (first, set(later), health) == ([503, 503], {503}, 503)
    assert took_s < 2  # 200 answers in less than three of the store's deadlines
    lines = [record.message for record in caplog.records if "store" in record.message]
    assert [line.split(":")[0].split(" after")[0] for line in lines] == [
        "metadata store is down",
        "metadata store answers again",
    ]
    http.close()
    gateway.close()
    redis.stop()


def test_with_stale_reads_known_keys_are_answered_while_the_store_is_away(tmp_path: Path) -> None:
    redis = servers.start_redis(tmp_path)
    gateway = start_gateway_thread(redis.url, is_private=False, stale_reads=True)
    with closing(Http(port_of(gateway))) as http:
        http.ask("PUT", KEY, b"1")
        redis.kill()

        assert http.ask("GET", KEY) == (200, b"1")
        assert http.ask("PUT", KEY, b"2")[0] == 503
        assert http.ask("GET", KEY) == (200, b"1")  # a write that was refused is not remembered
        assert http.ask("GET", "/metadata?key=other")[0] == 503
    gateway.close()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[GatewayThread]:
    """A gateway that wants TOKEN or mia:pass word, in a thread of its own."""
    (tmp_path / "token").write_text(TOKEN + "\n")
    (tmp_path / "users").write_text("# people\nmia:pass word\n")
    access = read_access(str(tmp_path / "token"), str(tmp_path / "users"))
    handle = gateway_in_thread(open_store("memory:"), GatewayOptions(access=access))
    yield handle
    handle.close()


def basic(login: str) -> str:
    return "Basic " + base64.b64encode(login.encode()).decode()


@pytest.mark.parametrize("authorization", [f"Bearer {TOKEN}", basic(f"any:{TOKEN}"), basic("mia:pass word")])
def test_a_right_login_reads_and_writes(guarded: GatewayThread, authorization: str) -> None:
    with closing(Http(port_of(guarded))) as http:
        assert http.ask("PUT", KEY, b"1", Authorization=authorization)[0] == 200
        assert http.ask("GET", KEY, Authorization=authorization) == (200, b"1")


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer wrong", basic("mia:wrong"), basic(f"{TOKEN}:"), "Basic ???", basic("mia:"), "Digest x"],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("target", [KEY, "/metadata/list?prefix=", "/metadata/watch?prefix=", "/metrics"])
def test_without_a_right_login_nothing_is_read_or_written(
    guarded: GatewayThread, authorization: str, method: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    right = f"Bearer {TOKEN}"
    with closing(Http(port_of(guarded))) as http:
        http.ask("PUT", KEY, b"kept", Authorization=right)
        status, body = http.ask(
            method, target, b"stolen", **({"Authorization": authorization} if authorization else {})
        )

        assert (status, b"kept" in body) == (401, False)
        assert http.ask("GET", KEY, Authorization=right) == (200, b"kept")
    assert TOKEN not in caplog.text and TOKEN not in body.decode()


def test_every_comparison_runs_whichever_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "users").write_text("a:1\nb:2\nc:3\n")
    access = read_access(None, str(tmp_path / "users"))
    compared: list[bytes] = []

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("mooncake_v0.metadata.gateway_auth.hmac.compare_digest", counting)

    assert access.allows(basic("a:1")) is True
    first = len(compared)
    assert access.allows(basic("zzz:9")) is False
    assert len(compared) == 2 * first
    assert Access().allows(None) is True
