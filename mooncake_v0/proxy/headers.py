"""Which headers pass through the proxy, in each direction."""

from __future__ import annotations

import re
import uuid
from typing import Iterable

from mooncake_v0.handoff import HEADER

RawHeaders = list[tuple[bytes, bytes]]

# RFC 9110 §7.6.1, and what belongs to one connection only
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", b"origin", HEADER.encode()}
# the server in front makes its own; a fixed length is set again where the body is sent in one piece
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server", b"content-length", b"x-request-id"}

SAFE_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first value of a header, or nothing; names in an ASGI scope are lower case."""
    for key, value in headers:
        if key == name:
            return value
    return b""


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's X-Request-Id where it can safely go into a log line, else a new one."""
    given = header(headers, b"x-request-id")
    return given.decode("ascii") if SAFE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers that this connection's `Connection` header declares to be its own."""
    names = [name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")]
    return frozenset(names)


def forwarded(
    headers: RawHeaders, request_id: str, upstream_key: str, *, keep_authorization: bool = True
) -> list[tuple[str, str]]:
    """The client's end-to-end headers for an instance.

    Its Authorization goes along unless the proxy has a key of its own for the instances, or checks clients itself: then
    the client's key is not for the instances to see.
    """
    dropped = NOT_FORWARDED | named_by_connection(headers)
    if upstream_key or not keep_authorization:
        dropped = dropped | {b"authorization"}
    kept = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name not in dropped]
    kept.append(("x-request-id", request_id))
    if upstream_key:
        kept.append(("authorization", f"Bearer {upstream_key}"))
    return kept


def returned(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> RawHeaders:
    """An instance's end-to-end headers for the client, with the request id."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = NOT_RETURNED | named_by_connection(lowered)
    # which browsers may call is the proxy's to say: vLLM allows every origin unless told otherwise
    kept = [(name, value) for name, value in lowered if name not in dropped and not name.startswith(b"access-control-")]
    kept.append((b"x-request-id", request_id.encode("latin-1")))
    return kept
