"""TcpReader against servers that do what no engine should: each read ends, and says why."""

from __future__ import annotations

import contextlib
import ctypes
import re
import socket
import struct
import threading
from typing import Callable, Iterator

import pytest

from mooncake_v0.errors import EngineError
from mooncake_v0.transfer import tcp_reader
from mooncake_v0.transfer.tcp_reader import PIECE_BYTES, TcpReader

NBYTES = 3 * PIECE_BYTES + 17
Serve = Callable[[socket.socket], None]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_reader, "STALLED_S", 0.3)
    monkeypatch.setattr(tcp_reader, "LIMIT_S", 0.6)


@contextlib.contextmanager
def server(serve: Serve) -> Iterator[tuple[int, threading.Event]]:
    """Its port, and what ends a wait of serve's. serve gets each connection, after its request."""
    done = threading.Event()

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                requests.append(connection.recv(24, socket.MSG_WAITALL))
                serve(connection)

    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1], done
        finally:
            done.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
    assert requests == [struct.pack("<QQB7x", NBYTES, 4711, 0)]


def read(port: int, host: str = "127.0.0.1") -> bytes:
    target = ctypes.create_string_buffer(NBYTES)
    TcpReader(host, port).read("peer:1", ctypes.addressof(target), 4711, NBYTES)
    return target.raw


def test_the_request_is_the_engines_and_the_bytes_may_come_in_any_pieces() -> None:
    data = bytes(range(251)) * (NBYTES // 251 + 1)

    def serve(connection: socket.socket) -> None:
        for start in range(0, NBYTES, 99_991):
            connection.sendall(data[start : min(start + 99_991, NBYTES)])

    with server(serve) as (port, _):
        assert read(port) == data[:NBYTES]


@pytest.mark.parametrize("sent", [0, 1, NBYTES - 1])
def test_an_end_before_the_last_byte(sent: int) -> None:
    expected = f"the connection ended after {sent} bytes"
    with (
        server(lambda connection: connection.sendall(bytes(sent))) as (port, _),
        pytest.raises(EngineError, match=expected),
    ):
        read(port)


def test_a_reset() -> None:
    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with server(serve) as (port, _), pytest.raises(EngineError, match="Connection reset by peer"):
        read(port)


@pytest.mark.parametrize("sent", [0, PIECE_BYTES])
def test_silence(short_limits: None, sent: int) -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(bytes(sent))
        done.wait(10)

    expected = f"after {sent} bytes fewer than {PIECE_BYTES} more came in 0.3 s"
    with server(serve) as (port, done), pytest.raises(EngineError, match=expected):
        read(port)


def test_a_piece_now_and_then_is_not_enough(short_limits: None) -> None:
    def serve(connection: socket.socket) -> None:
        while not done.wait(0.25):
            connection.sendall(bytes(PIECE_BYTES))

    with server(serve) as (port, done), pytest.raises(EngineError, match=r"only \d+ bytes came in 0.6 s"):
        read(port)


def test_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(EngineError, match="Connection refused") as failure:
            read(port)

    expected = f"read of {NBYTES} bytes from segment 'peer:1' at 127.0.0.1:{port} failed"
    assert str(failure.value).startswith(expected) and failure.value.fix


def test_a_host_that_drops_what_asks_for_a_connection(short_limits: None) -> None:
    """A listener whose queue is full: Linux drops, as a firewall does."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        with pytest.raises(EngineError, match="no connection in 0.3 s"):
            read(listener.getsockname()[1])


def test_a_name_without_an_address() -> None:
    with pytest.raises(EngineError, match=re.escape("host 'no.such.host.invalid' cannot be resolved")):
        read(1, host="no.such.host.invalid")
