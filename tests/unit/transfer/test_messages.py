from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_v0.errors import ProtocolError
from mooncake_v0.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Absent,
    Announce,
    Dropped,
    Hello,
    Message,
    Query,
    Ready,
    Select,
    decode_peer,
    decode_worker,
    encode,
)

KEY = b"k" * 16

GOOD = [
    Hello(1, "decode", 0, 1, "e", "h:1", "d", {"model": "x"}),
    Announce(KEY, 4096),
    Ready(KEY, 3, 1 << 47, 4096, 4096),
    Query(KEY),
    Absent(KEY),
    Dropped([KEY, KEY]),
]


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_peer_messages_survive_the_wire(message: Message) -> None:
    assert decode_peer(encode(message)) == message


def test_worker_messages_survive_the_wire() -> None:
    assert decode_worker(encode(Select(1, [KEY], 2.0))) == Select(1, [KEY], 2.0)


BAD = {
    "short key": encode(Query(b"short")),
    "no bytes": encode(Announce(KEY, 0)),
    "negative size": encode(Announce(KEY, -1)),
    "10^12 GiB": encode(Announce(KEY, 10**21 // 1024)),
    "more ready than there is": encode(Ready(KEY, 1, 1, 4096, 8192)),
    "too many keys": encode(Dropped([KEY] * 5000)),
    "a worker's message": encode(Select(1, [KEY], 2.0)),
    "unknown tag": msgspec.msgpack.encode({"type": "Evil"}),
    "unknown field": msgspec.msgpack.encode({"type": "Query", "key": KEY, "more": 1}),
    "not msgpack": b"\x80\x04\x95pickle",
    "nothing": b"",
    "too long": b"\x00" * (MAX_MESSAGE_BYTES + 1),
    "deeply nested": b"\x91" * 100_000,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_anything_else_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_peer(data)


@given(st.binary(max_size=300))
def test_random_bytes_are_messages_or_protocol_errors(data: bytes) -> None:
    try:
        message = decode_peer(data)
    except ProtocolError:
        return
    assert isinstance(message, Message)
