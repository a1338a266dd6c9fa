from __future__ import annotations

import math
import random

import msgspec
import pytest

from mooncake_v0.errors import ProtocolError
from mooncake_v0.handoff import ID_BYTES
from mooncake_v0.transfer.messages import (
    KEY_BYTES,
    MAX_KEYS,
    Abort,
    Arriving,
    Commit,
    Ended,
    Message,
    PeerPool,
    Poll,
    Polled,
    Release,
    Reserve,
    Reserved,
    Select,
    Selected,
    WorkerStatusRequest,
    encode,
)
from mooncake_v0.transfer.worker_checks import MAX_COUNTERS, MAX_WAIT_S, decode_checked

KEY = bytes(KEY_BYTES)
HUGE = (1 << 63) - 1

SENSE: list[Message] = [
    Reserve(1, [KEY], [4096]),
    Reserve(1, [], []),
    Reserved(1, [-1, 0, 4096], ["full", "", ""]),
    Commit([KEY], [0]),
    Abort([KEY]),
    Select(1, [KEY, KEY], 0.0),
    Poll(1, [KEY], MAX_WAIT_S, [b""]),
    Selected(1, [-1, 0], [0, 4096], ["late", ""], [0, 1], [0, HUGE]),
    Poll(1, [KEY, KEY], 0.0, [b"", bytes(ID_BYTES)]),
    Polled(1, [True, False], [False, False], [None, Arriving(4096, HUGE, 8192, 4096)]),
    Ended([bytes(ID_BYTES)]),
    Release([], {"hits": 1.0}),
    PeerPool(0, 0),
    WorkerStatusRequest(-HUGE),
]
NONSENSE: dict[str, Message] = {
    "negative size": Reserve(1, [KEY], [-4096]),
    "size of nothing": Reserve(1, [KEY], [0]),
    "huge size": Reserve(1, [KEY], [HUGE]),
    "more keys than sizes": Reserve(1, [KEY, KEY], [4096]),
    "more sizes than keys": Reserve(1, [KEY], [4096, 4096]),
    "too many keys": Abort([KEY] * (MAX_KEYS + 1)),
    "short key": Reserve(1, [b"x"], [4096]),
    "long key": Select(1, [bytes(1000)], 1.0),
    "negative commit": Commit([KEY], [-1]),
    "huge commit": Commit([KEY], [HUGE]),
    "keys without sizes": Commit([KEY], []),
    "wait for ever": Select(1, [KEY], math.inf),
    "wait for no number": Select(1, [KEY], math.nan),
    "wait for less than nothing": Select(1, [KEY], -1e300),
    "poll for ever": Poll(1, [KEY], 1e300, [b""]),
    "poll for no number": Poll(1, [KEY], math.nan, [b""]),
    "poll without handoffs": Poll(1, [KEY], 1.0, []),
    "poll with a short handoff": Poll(1, [KEY], 1.0, [b"x"]),
    "polled without what is awaited": Polled(1, [True], [], [None]),
    "polled without what is arriving": Polled(1, [True], [False], []),
    "arriving at a negative offset": Polled(1, [True], [False], [Arriving(-1, 1, 4096, 0)]),
    "arriving in more bytes than it has": Polled(1, [True], [False], [Arriving(0, 1, 4096, 4097)]),
    "arriving in a negative number of bytes": Polled(1, [True], [False], [Arriving(0, 1, 4096, -1)]),
    "arriving in a huge size": Polled(1, [True], [False], [Arriving(0, 1, HUGE, 1)]),
    "ended nothing": Ended([b""]),
    "ended too many": Ended([bytes(ID_BYTES)] * (MAX_KEYS + 1)),
    "counter that is no number": Release([], {"hits": math.nan}),
    "counter without end": Release([], {"hits": math.inf}),
    "too many counters": Release([], {str(number): 1.0 for number in range(MAX_COUNTERS + 1)}),
    "negative offset": Reserved(1, [-2], [""]),
    "offsets without reasons": Reserved(1, [0, 0], [""]),
    "selected of a negative size": Selected(1, [0], [-1], [""], [0], [0]),
    "selected of a huge size": Selected(1, [0], [HUGE], [""], [0], [0]),
    "selected without pools": Selected(1, [0], [1], [""], [], [0]),
    "selected without generations": Selected(1, [0], [1], [""], [0], []),
    "huge pool": PeerPool(1, HUGE),
    "pool of a negative size": PeerPool(1, -1),
}


@pytest.mark.parametrize("message", SENSE, ids=lambda message: type(message).__name__)
def test_what_makes_sense_is_passed_on(message: Message) -> None:
    assert decode_checked(encode(message)) == message


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE)
def test_what_makes_no_sense_is_refused_with_its_kind(message: Message) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__):
        decode_checked(encode(message))


def test_bytes_of_any_kind_are_a_message_or_refused() -> None:
    """Random ones, messages that are cut off, and messages with one bit changed: 6,000 of them."""
    numbers = random.Random(7)
    good = [encode(message) for message in (*SENSE, *NONSENSE.values())]
    for _ in range(2000):
        data = bytearray(numbers.choice(good)[:5000])
        data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
        for each in (
            bytes(data),
            bytes(data[: numbers.randrange(len(data))]),
            numbers.randbytes(numbers.randrange(64)),
        ):
            try:
                assert isinstance(decode_checked(each), msgspec.Struct)
            except ProtocolError:
                continue


def test_numbers_that_fit_no_machine_word_are_refused() -> None:
    message = {"type": "Reserve", "call": 1, "keys": [KEY], "nbytes": [(1 << 64) - 1]}

    with pytest.raises(ProtocolError):
        decode_checked(msgspec.msgpack.encode(message))
