from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_v0.metadata.gateway_http import (
    BODY,
    HEAD,
    IDLE,
    MAX_HEAD_BYTES,
    MAX_VALUE_BYTES,
    Reply,
    Request,
    RequestReader,
    encoded,
)

STREAM = (
    b"GET /metadata?key=a HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n\r\n"
    b"PUT /metadata?key=b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
    b"PUT /metadata?key=c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n1\r\nf\r\n0\r\nIf-Match: late\r\n\r\n"
    b'DELETE /metadata?key=d HTTP/1.1\r\nIf-Match: "0"\r\nif-match: second\r\nConnection: close\r\n\r\n'
)


def read(*parts: bytes) -> tuple[list[Request], RequestReader]:
    reader = RequestReader()
    return [request for part in parts for request in reader.feed(part)], reader


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_requests_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]

    requests, reader = read(*(STREAM[a:b] for a, b in zip(edges, edges[1:])))

    assert [(r.method, r.target, r.authorization, r.if_match, r.body, r.keep_alive) for r in requests] == [
        ("GET", "/metadata?key=a", "Bearer t", None, b"", True),
        ("PUT", "/metadata?key=b", None, None, b"abc", True),
        ("PUT", "/metadata?key=c", None, None, b"def", True),
        ("DELETE", "/metadata?key=d", None, '"0"', b"", False),
    ]
    assert (reader.refused, reader.stage) == (None, IDLE)


@given(st.binary(), st.binary())
def test_no_bytes_raise(first: bytes, second: bytes) -> None:
    read(first, second)
    read(STREAM[:40], first, second)


def status_of(reader: RequestReader) -> int | None:
    return reader.refused and reader.refused.status


def test_the_stage_follows_the_request() -> None:
    reader = RequestReader()
    stages = [reader.stage]
    for part in (b"PUT / HTTP/1.1\r\nContent-Length: 2", b"\r\n\r\na", b"b", b"GET"):
        reader.feed(part)
        stages.append(reader.stage)

    assert stages == [HEAD, HEAD, BODY, IDLE, HEAD]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02 not http\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),  # smuggling
        (b"GET / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_VALUE_BYTES + 1), 413),
        (b"PUT / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET /" + b"a" * MAX_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * MAX_HEAD_BYTES, 431),
    ],
)
def test_what_is_no_request_or_too_large_is_refused_and_read_no_further(data: bytes, status: int) -> None:
    requests, reader = read(data)

    assert (requests, status_of(reader)) == ([], status)


def test_requests_before_a_bad_one_are_kept() -> None:
    requests, reader = read(STREAM[: STREAM.index(b"PUT")] + b"nonsense \r\n\r\n")

    assert ([r.target for r in requests], status_of(reader)) == (["/metadata?key=a"], 400)


def test_a_chunked_body_is_bounded() -> None:
    head = b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    part = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"

    assert status_of(read(head, *[part] * 16)[1]) is None
    assert status_of(read(head, *[part] * 16, b"1\r\nx\r\n")[1]) == 413


def test_a_request_for_another_protocol_is_the_last_one() -> None:
    (request,), reader = read(b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nPRI * HTTP/2.0\r\n\r\n")

    assert (request.keep_alive, reader.refused) == (False, None)


def test_a_reply_is_one_piece() -> None:
    lines = encoded(Reply(404, b"no", headers={"Allow": "GET"}), is_last=True).split(b"\r\n")

    assert lines[:3] == [b"HTTP/1.1 404 Not Found", b"Content-Type: application/json", b"Allow: GET"]
    assert lines[3].startswith(b"Date: ") and lines[3].endswith(b" GMT")
    assert lines[4:] == [b"Connection: close", b"Content-Length: 2", b"", b"no"]
    assert encoded(Reply(200, b"no"), is_last=False, without_body=True).endswith(b"Content-Length: 2\r\n\r\n")
