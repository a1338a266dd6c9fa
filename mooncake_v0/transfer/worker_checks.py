"""Whether a message between worker and agent makes sense, before either end acts on it.

The schema (messages.py) says what may be in a message; this says which values. Either process may be broken or of another
build: an agent that is sent nonsense ends, a worker that is sent nonsense replaces its agent.
"""

from __future__ import annotations

import math

from mooncake_v0.errors import ProtocolError
from mooncake_v0.transfer.messages import (
    KEY_BYTES,
    MAX_KEYS,
    Arriving,
    Ended,
    PeerPool,
    Poll,
    Release,
    Reserve,
    Select,
    WorkerMessage,
    are_handoffs,
    decode_worker,
)
from mooncake_v0.transfer.same_host import HANDLE_BYTES

MAX_WAIT_S = 86_400.0
MAX_COUNTERS = 256
_MAX_NBYTES = 1 << 48
_OF_EACH_KEY = (
    *("keys", "nbytes", "ready_nbytes", "offsets", "reasons", "pools", "generations"),
    *("settled", "awaited", "arriving"),
)


def decode_checked(data: bytes) -> WorkerMessage:
    """Decode a message of the worker or of the agent; ProtocolError for one that neither would send."""
    message = decode_worker(data)
    problem = _problem(message)
    if problem:
        raise ProtocolError(f"{type(message).__name__} with {problem}")
    return message


def _problem(message: WorkerMessage) -> str:
    """What is wrong with it, or nothing."""
    rows = {name: row for name in _OF_EACH_KEY if isinstance(row := getattr(message, name, None), list)}
    if len({len(row) for row in rows.values()}) > 1:
        return f"{', '.join(rows)} of different lengths"
    if any(len(row) > MAX_KEYS for row in rows.values()):
        return f"more than {MAX_KEYS} keys"
    if any(len(key) != KEY_BYTES for key in rows.get("keys", ())):
        return f"a key that has not {KEY_BYTES} bytes"
    least = 1 if isinstance(message, Reserve) else 0
    sizes = [message.nbytes] if isinstance(message, PeerPool) else rows.get("nbytes", [])
    if not all(least <= size < _MAX_NBYTES for size in (*sizes, *rows.get("ready_nbytes", ()))):
        return "a size that no entry has"
    if isinstance(message, PeerPool) and len(message.device_handle) not in (0, HANDLE_BYTES):
        return f"a handle of {len(message.device_handle)} bytes"
    if any(offset < -1 for offset in rows.get("offsets", ())):
        return "a negative offset"
    if any(one is not None and not _is_entry(one) for one in rows.get("arriving", ())):
        return "an entry that cannot be"
    if isinstance(message, (Select, Poll)) and not 0 <= message.wait_s <= MAX_WAIT_S:
        return f"a wait of {message.wait_s} s"
    if isinstance(message, Ended) and not are_handoffs(message.handoffs):
        return "what are no handoffs"
    if isinstance(message, Poll):
        return _problem_of_handoffs(message)
    if isinstance(message, Release):
        return _problem_of_counters(message.counters)
    return ""


def _is_entry(one: Arriving) -> bool:
    return one.offset >= 0 and 0 <= one.ready_nbytes <= one.nbytes < _MAX_NBYTES


def _problem_of_handoffs(poll: Poll) -> str:
    good = len(poll.handoffs) == len(poll.keys) and are_handoffs([one for one in poll.handoffs if one])
    return "" if good else "what are no handoffs"


def _problem_of_counters(counters: dict[str, float]) -> str:
    if len(counters) > MAX_COUNTERS:
        return f"more than {MAX_COUNTERS} counters"
    return "" if all(math.isfinite(value) for value in counters.values()) else "a counter that is no number"
