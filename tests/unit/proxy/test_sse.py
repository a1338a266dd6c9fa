"""Events pass whole, bytes unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake_v0.proxy.sse import HELD_LIMIT_BYTES, EventFramer

PIECES = st.lists(
    st.sampled_from([b"data: a", b"\n", b"\n\n", b"\r\n\r\n", b"[DONE]", b": c\n\n", b"\r\n"]), max_size=20
)


@given(pieces=PIECES)
def test_what_comes_out_is_what_went_in(pieces: list[bytes]) -> None:
    framer = EventFramer()

    out = b"".join(framer.feed(piece) for piece in pieces) + framer.rest()

    assert out == b"".join(pieces)


@given(pieces=PIECES)
def test_every_piece_that_comes_out_ends_an_event(pieces: list[bytes]) -> None:
    framer = EventFramer()

    passed = [framer.feed(piece) for piece in pieces]

    assert all(one.endswith((b"\n\n", b"\r\n\r\n")) for one in passed if one)


def test_half_an_event_waits_for_its_end() -> None:
    framer = EventFramer()

    assert framer.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert framer.feed(b"\n") == b""
    assert framer.feed(b"\n") == b"data: b\n\n"


def test_giant_without_an_end_is_not_held_for_ever() -> None:
    framer = EventFramer()

    assert framer.feed(b"x" * (HELD_LIMIT_BYTES + 1)) != b""


def test_end_marker_is_seen_even_in_two_pieces() -> None:
    framer = EventFramer()

    framer.feed(b"data: [DO")
    assert not framer.ended
    framer.feed(b"NE]\n\n")
    assert framer.ended
