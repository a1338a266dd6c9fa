"""Everything that is said between two agents, and between an agent and its worker, as frozen data.

msgpack with a schema: `decode_peer` and `decode_worker` raise ProtocolError for anything else. Between agents::

    decode → prefill   Hello                            prefill → decode   Welcome | Refused
    both               Ping                             (answered by Pong; silence means the peer is down)
    prefill → decode   Announce(key, nbytes)            before the forward pass that computes the entry
    prefill → decode   Ready(key, …, ready_nbytes)      that many leading bytes may be read; repeated as it grows
    prefill → decode   Withdrawn(key)                   the entry will not come
    decode → prefill   ReadDone(key, generation)        all bytes are here
    prefill → decode   Confirmed(key, generation, valid)    the region was not reused meanwhile: the bytes are good
    decode → prefill   ReadFailed(key, generation)
    decode → prefill   Dropped(keys)                    no longer held
    decode → prefill   Used(key, generation)            copied straight out of the mapped pool (same host)
    decode → prefill   Query(key)                       answered by Ready, Announce or Absent
    prefill → decode   Ended(handoffs)                  prefill has answered these requests: nothing more will be announced
    anyone → any       StatusRequest                    answered by Status

Between worker and agent, over an inherited socket pair: Reserve → Reserved, Commit, Abort, Ended,
Select → Selected, Poll → Polled, Release; over a second one, so that they never wait for a step: PeerPool with the
descriptor of the peer's pool, answered by PeerPoolMapped, and Report.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

from mooncake_v0.errors import ProtocolError
from mooncake_v0.handoff import ID_BYTES

PROTOCOL_VERSION = 4
KEY_BYTES = 16
MAX_MESSAGE_BYTES = 256 * 1024
MAX_KEYS = 4096


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""


class Hello(Message, frozen=True):
    """What two agents must agree on before the first entry moves."""

    version: int
    role: str
    rank: int
    tp_size: int
    epoch: str
    segment_name: str
    config_digest: str
    fingerprint: dict[str, str]


class Welcome(Hello, frozen=True):
    """The prefill side's own Hello; sent when nothing disagrees.

    pool_socket: abstract Unix socket that hands out its pool to this host; empty where it does not
    pool_nonce:  what the pool's nonce must be
    pool_on_device: whether it is device memory, which the engine cannot read
    """

    pool_socket: str = ""
    pool_nonce: bytes = b""
    pool_on_device: bool = False


class Refused(Message, frozen=True):
    """The named field differs; transfer stays off until one side is put right."""

    field: str
    ours: str
    theirs: str


class Ping(Message, frozen=True):
    epoch: str


class Pong(Message, frozen=True):
    epoch: str


class Announce(Message, frozen=True):
    key: bytes
    nbytes: int


class Ready(Message, frozen=True):
    key: bytes
    generation: int
    address: int
    nbytes: int
    ready_nbytes: int


class Withdrawn(Message, frozen=True):
    key: bytes


class ReadDone(Message, frozen=True):
    """wants_checksum: Confirmed is to have the entry's, if prefill computes one."""

    key: bytes
    generation: int
    wants_checksum: bool = False


class ReadFailed(Message, frozen=True):
    key: bytes
    generation: int


class Confirmed(Message, frozen=True):
    key: bytes
    generation: int
    valid: bool
    checksum: Union[int, None] = None


class Used(Message, frozen=True):
    key: bytes
    generation: int


class Dropped(Message, frozen=True):
    keys: list[bytes]


class Query(Message, frozen=True):
    key: bytes


class Absent(Message, frozen=True):
    key: bytes


class Ended(Message, frozen=True):
    """Also from prefill's worker to its agent. handoffs: ids of `mooncake_v0.handoff`."""

    handoffs: list[bytes]


class StatusRequest(Message, frozen=True):
    pass


class Status(Message, frozen=True):
    """One agent's state, for `mooncake-v0 status`, the demo and the tests.

    transport: how entries come to decode: "engine", "shm" (the peer's pool is mapped), "cuda_ipc" (so is its device
               memory), "none" (that cannot be had here), "" while that is not settled
    in_flight: entries on their way to decode, or offered by prefill and not taken yet
    """

    role: str
    rank: int
    epoch: str
    engine: str
    peer: str
    peer_epoch: str
    buffer_bytes: int
    buffer_limit_bytes: int
    entries: int
    counters: dict[str, float]
    transport: str = ""
    in_flight: int = 0


# --- worker and agent -------------------------------------------------------------------------------------------------


class Reserve(Message, frozen=True):
    """Producer: space for entries that the coming forward pass computes."""

    call: int
    keys: list[bytes]
    nbytes: list[int]


class Reserved(Message, frozen=True):
    """Per key the offset in the pool, or -1 with the reason."""

    call: int
    offsets: list[int]
    reasons: list[str]


class Commit(Message, frozen=True):
    """Producer: the leading ready_nbytes of these entries are in the pool."""

    keys: list[bytes]
    ready_nbytes: list[int]


class Abort(Message, frozen=True):
    """Producer: these reserved entries will not be completed."""

    keys: list[bytes]


class Select(Message, frozen=True):
    """Consumer: pin these entries; wait up to wait_s for those in flight."""

    call: int
    keys: list[bytes]
    wait_s: float


class Selected(Message, frozen=True):
    """Per key the offset in a pool and its size, or -1 with the reason.

    pools:       0 for the worker's own, else the number of a mapped pool of the peer
    generations: what the cell at the offset must be before and after the copy out of a mapped pool
    """

    call: int
    offsets: list[int]
    nbytes: list[int]
    reasons: list[str]
    pools: list[int]
    generations: list[int]


class Poll(Message, frozen=True):
    """Consumer: are these entries here? Answered when one is settled (here, or known not to come), or after wait_s.

    handoffs: per key the id of the handoff that is to bring it, or nothing; while prefill has not ended it, the key may
              still be announced
    """

    call: int
    keys: list[bytes]
    wait_s: float
    handoffs: list[bytes]


class Arriving(msgspec.Struct, frozen=True, array_like=True):
    """An entry on its way into the worker's own pool: its leading ready_nbytes are there, and not confirmed yet."""

    offset: int
    generation: int
    nbytes: int
    ready_nbytes: int


class Polled(Message, frozen=True):
    """Per key whether it is settled: a Select of it would not wait. awaited: its prefill leg lives.

    arriving: per key what is here of it already, if something is
    """

    call: int
    settled: list[bool]
    awaited: list[bool]
    arriving: list[Union[Arriving, None]]


class Release(Message, frozen=True):
    """Consumer: done with pinned entries. counters: what the worker counted since the last message."""

    keys: list[bytes]
    counters: dict[str, float] = {}


class PeerPool(Message, frozen=True):
    """Agent to worker, with a descriptor: map this pool of the peer. number 0, without one: unmap it.

    device_handle: of a pool in device memory
    """

    number: int
    nbytes: int
    device_handle: bytes = b""


class PeerPoolMapped(Message, frozen=True):
    """Worker to agent: entries of this pool can be used."""

    number: int


class Report(Message, frozen=True):
    """Agent to worker, unasked, when its state has changed, once a second at most: for the metrics."""

    status: Status


class WorkerStatusRequest(Message, frozen=True):
    call: int


class WorkerStatus(Message, frozen=True):
    call: int
    status: Status


PeerMessage = Union[
    Hello,
    Welcome,
    Refused,
    Ping,
    Pong,
    Announce,
    Ready,
    Withdrawn,
    ReadDone,
    ReadFailed,
    Confirmed,
    Used,
    Dropped,
    Query,
    Absent,
    Ended,
    StatusRequest,
    Status,
]
WorkerMessage = Union[
    Reserve,
    Reserved,
    Commit,
    Abort,
    Ended,
    Select,
    Selected,
    Poll,
    Polled,
    Release,
    PeerPool,
    PeerPoolMapped,
    Report,
    WorkerStatusRequest,
    WorkerStatus,
]

_encoder = msgspec.msgpack.Encoder()
_peer_decoder = msgspec.msgpack.Decoder(PeerMessage)
_worker_decoder = msgspec.msgpack.Decoder(WorkerMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_peer(data: bytes) -> PeerMessage:
    """Decode a message of another agent; bounded before anything is allocated for it."""
    message: PeerMessage = _decode(_peer_decoder, data)
    key = getattr(message, "key", None)
    if key is not None and len(key) != KEY_BYTES:
        raise ProtocolError(f"a key has {len(key)} bytes, expected {KEY_BYTES}")
    if isinstance(message, Dropped) and len(message.keys) > MAX_KEYS:
        raise ProtocolError(f"a message names {len(message.keys)} keys, the limit is {MAX_KEYS}")
    if isinstance(message, Ended) and not are_handoffs(message.handoffs):
        raise ProtocolError(f"{len(message.handoffs)} handoffs are no ids, or more than {MAX_KEYS}")
    if isinstance(message, (Announce, Ready)) and not 0 < message.nbytes < 1 << 48:
        raise ProtocolError(f"an entry of {message.nbytes} bytes is announced")
    if isinstance(message, Ready) and not 0 <= message.ready_nbytes <= message.nbytes:
        raise ProtocolError(f"{message.ready_nbytes} of {message.nbytes} bytes are said to be ready")
    return message


def are_handoffs(handoffs: list[bytes]) -> bool:
    return len(handoffs) <= MAX_KEYS and all(len(one) == ID_BYTES for one in handoffs)


def decode_worker(data: bytes) -> WorkerMessage:
    message: WorkerMessage = _decode(_worker_decoder, data)
    return message


def _decode(decoder: Any, data: bytes) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has {len(data)} bytes, the limit is {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from error
