"""HTTP/1.1 as the gateway speaks it: bytes in, whole requests out, and replies as bytes. No sockets.

`gateway_connection` feeds it. The grammar is llhttp's (httptools), which also refuses what could smuggle a request; the
bounds are ours.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

import httptools

MAX_VALUE_BYTES = 1024 * 1024  # the wheel's server's limit (aiohttp's default); etcd's own is 1.5 MiB
MAX_HEAD_BYTES = 32 * 1024
JSON = "application/json"

IDLE = "idle"  # nothing of the next request has arrived
HEAD = "head"
BODY = "body"

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_KEPT_HEADERS = (b"authorization", b"if-match", b"expect")


class Request(NamedTuple):
    """One whole request. target: as it came, percent-encoded; arrived_s: on time.perf_counter's clock."""

    method: str
    target: str
    authorization: str | None
    if_match: str | None
    body: bytes
    keep_alive: bool
    version: str
    arrived_s: float


@dataclass(frozen=True)
class Reply:
    """An answer. watch_prefix: it goes on with the stream of changes under this prefix instead of a body."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    watch_prefix: str | None = None


def refusal(status: int, what: str, fix: str, headers: dict[str, str] | None = None) -> Reply:
    """An error as JSON; 401 gets the challenge that browsers and curl expect."""
    extra = {"WWW-Authenticate": 'Basic realm="mooncake-v0"'} if status == 401 else {}
    return Reply(status, json.dumps({"error": what, "fix": fix}).encode(), headers={**extra, **(headers or {})})


class RequestReader:
    """The requests of one connection.

    stage:    how far the next request has come: IDLE, HEAD (also before the very first one) or BODY
    refused:  the answer to what is no request or too large; nothing can be read after it
    """

    def __init__(self) -> None:
        self.stage = HEAD
        self.refused: Reply | None = None
        self.wants_continue = False
        self._parser = httptools.HttpRequestParser(self)
        self._whole: list[Request] = []
        self._head_bytes = 0

    def feed(self, data: bytes) -> list[Request]:
        """The requests that this data completes."""
        self._whole = []
        if self.stage != BODY:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is taken up: the request that asked is the last one (`keep_alive`)
        except httptools.HttpParserError as error:
            self._refuse(refusal(400, f"not understood as HTTP: {error}", "send HTTP/1.1"))
        if self.stage != BODY and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(refusal(431, f"the head of the request is over {MAX_HEAD_BYTES} bytes", "send less"))
        return self._whole

    def _refuse(self, reply: Reply) -> None:
        self.refused = self.refused or reply

    # what follows is called by the parser

    def on_message_begin(self) -> None:
        self.stage = HEAD
        self._url = b""
        self._headers: dict[bytes, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.stage != HEAD:
            return  # a trailer
        name = name.lower()
        if name in _KEPT_HEADERS:
            self._headers.setdefault(name, value.decode("latin-1"))
        elif name == b"content-length":
            self._check_size(int(value))

    def on_headers_complete(self) -> None:
        self.stage = BODY
        self._head_bytes = 0
        self.wants_continue = self._headers.get(b"expect", "").lower() == "100-continue"

    def on_body(self, part: bytes) -> None:
        self._body_bytes += len(part)
        self._check_size(self._body_bytes)
        if self.refused is None:
            self._body.append(part)

    def on_message_complete(self) -> None:
        self.stage = IDLE
        self.wants_continue = False
        if self.refused is not None:
            return
        parser, headers = self._parser, self._headers
        self._whole.append(
            Request(
                parser.get_method().decode("ascii"),
                self._url.decode("ascii"),
                headers.get(b"authorization"),
                headers.get(b"if-match"),
                b"".join(self._body),
                parser.should_keep_alive() and not parser.should_upgrade(),
                parser.get_http_version(),
                time.perf_counter(),
            )
        )

    def _check_size(self, size: int) -> None:
        if size > MAX_VALUE_BYTES:
            self._refuse(
                refusal(413, f"the value is over {MAX_VALUE_BYTES} bytes", "register fewer regions, or larger ones")
            )


def encoded(reply: Reply, *, is_last: bool, without_body: bool = False) -> bytes:
    """A reply as it goes over the wire, in one piece. without_body: the answer to HEAD."""
    head = _head(reply, is_last) + f"Content-Length: {len(reply.body)}\r\n\r\n"
    return head.encode("latin-1") if without_body else head.encode("latin-1") + reply.body


def encoded_stream_head(reply: Reply, *, is_chunked: bool) -> bytes:
    """The head of an answer without a known length; what is not chunked ends with the connection."""
    return (_head(reply, not is_chunked) + ("Transfer-Encoding: chunked\r\n\r\n" if is_chunked else "\r\n")).encode()


def chunk(data: bytes) -> bytes:
    """One part of a chunked answer; an empty one is its end."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _head(reply: Reply, is_last: bool) -> str:
    lines = [f"HTTP/1.1 {reply.status} {_PHRASES[reply.status]}\r\nContent-Type: {reply.content_type}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in reply.headers.items()]
    lines.append(_date_line(int(time.time())))
    return "".join(lines) + ("Connection: close\r\n" if is_last else "")


@lru_cache(maxsize=1)
def _date_line(now: int) -> str:
    return f"Date: {formatdate(now, usegmt=True)}\r\n"
