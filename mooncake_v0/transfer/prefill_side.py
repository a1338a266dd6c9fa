"""Prefill's half of an agent: reserves entries for its worker, offers them to the peer, answers its questions.

An entry is announced before the forward pass that computes it, so the peer knows of it before the prefill's answer can
reach the proxy. It stays in the buffer after the peer has read it, evictable, for a peer that lost its copy. A peer on this
host that has mapped the pool copies entries out of it without asking; the generations in the pool's table tell it whether
it may.
"""

from __future__ import annotations

import logging
import time
from typing import Callable

from mooncake_v0.errors import ProtocolError
from mooncake_v0.transfer.checksums import Hasher, Running
from mooncake_v0.transfer.lookup_buffer import HELD, LOST, READY, RESERVED, Entry, LookupBuffer
from mooncake_v0.transfer.messages import (
    Abort,
    Absent,
    Announce,
    Commit,
    Confirmed,
    Dropped,
    Ended,
    Message,
    PeerMessage,
    Query,
    ReadDone,
    ReadFailed,
    Ready,
    Reserve,
    Reserved,
    Used,
    Withdrawn,
)
from mooncake_v0.transfer.peer import NO_PEER, Peer
from mooncake_v0.transfer.pool import Pool

logger = logging.getLogger(__name__)

READ_PIN_S = 30.0  # an entry offered to the peer is kept at least this long for it
RESERVATION_S = 120.0  # a forward pass that takes longer has died

HELD_BY_PEER = "held"  # reasons in Reserved: nothing to gather, for good reasons
EXISTS = "exists"


class PrefillSide:
    """send: to the peer, dropped when there is none; hasher: None without checksums."""

    def __init__(
        self, buffer: LookupBuffer, peer: Peer, pool: Pool, *, send: Callable[[Message], None], hasher: Hasher | None
    ) -> None:
        self._buffer = buffer
        self._peer = peer
        self._pool = pool
        self._send = send
        self._hasher = hasher
        self._peer_checks = True  # until a ReadDone says that it does not
        self._peer_maps = False  # until it says that it used an entry in this pool
        self._hashing: dict[bytes, Entry] = {}
        self._unconfirmed: dict[bytes, ReadDone] = {}  # waiting for their checksum
        pool.clear_generations()
        self._held_by_peer: set[bytes] = set()
        self._reserved: dict[bytes, Entry] = {}
        self._reading: dict[bytes, tuple[Entry, float]] = {}  # offered to the peer: pinned until, monotonic seconds

    @property
    def in_flight(self) -> int:
        """Entries that the peer was offered and has not taken yet."""
        return len(self._reading)

    def on_worker(self, message: object, reply: Callable[[Message], None]) -> None:
        if isinstance(message, Reserve):
            results = [self._reserve(key, nbytes) for key, nbytes in zip(message.keys, message.nbytes)]
            reply(Reserved(message.call, [offset for offset, _ in results], [reason for _, reason in results]))
        elif isinstance(message, Commit):
            for key, ready_nbytes in zip(message.keys, message.ready_nbytes):
                self._commit(key, ready_nbytes)
        elif isinstance(message, Abort):
            for key in message.keys:
                self._abort(key)
        elif isinstance(message, Ended):
            self._send(message)

    def on_peer(self, message: PeerMessage) -> None:
        if isinstance(message, ReadDone):
            self._read_done(message)
        elif isinstance(message, ReadFailed):
            self._buffer.counters["peer_read_failed"] += 1
            self._unpin(message.key)
        elif isinstance(message, Used):
            self._used(message)
        elif isinstance(message, Dropped):
            self._held_by_peer.difference_update(message.keys)
        elif isinstance(message, Query):
            self._answer(message.key)

    def on_peer_up(self) -> None:
        self._held_by_peer.clear()
        self._peer_checks, self._peer_maps = True, False

    def on_peer_down(self) -> None:
        self._held_by_peer.clear()
        self._unconfirmed.clear()
        for key in list(self._reading):
            self._unpin(key)

    def tick(self, now_s: float) -> None:
        for key, (_, until_s) in list(self._reading.items()):
            if now_s > until_s:
                self._unpin(key)
        for entry in list(self._reserved.values()):
            if now_s - entry.used_at_s > RESERVATION_S:
                self._drop_reservation(entry)
        self._buffer.expire(now_s)
        self._tell_dropped()

    def _reserve(self, key: bytes, nbytes: int) -> tuple[int, str]:
        now_s = time.monotonic()
        if not self._peer.up:
            return -1, NO_PEER
        if key in self._held_by_peer:
            self._buffer.counters["skipped_held"] += 1
            return -1, HELD_BY_PEER
        entry = self._buffer.get(key)
        if entry is not None:
            self._buffer.touch(entry, now_s)
            self._answer(key)
            self._buffer.counters["skipped_exists"] += 1
            return -1, EXISTS
        made = self._buffer.insert(key, nbytes, now_s)
        self._tell_dropped()
        if isinstance(made, str):
            if made == "too_large":
                logger.warning(
                    "a prompt's KV has %d bytes and kv_buffer_size is %d bytes: it is computed twice; raise kv_buffer_size",
                    nbytes,
                    self._buffer.limit_bytes,
                )
            return -1, made
        self._reserved[key] = made
        self._send(Announce(key, nbytes))
        return made.offset, ""

    def _commit(self, key: bytes, ready_nbytes: int) -> None:
        entry = self._buffer.get(key)
        if entry is None or entry.state != RESERVED:
            return
        if ready_nbytes > entry.nbytes:
            raise ProtocolError(f"Commit of {ready_nbytes} bytes of an entry that has {entry.nbytes}")
        entry.ready_nbytes = ready_nbytes
        if ready_nbytes == entry.nbytes:
            entry.state = READY
            self._reserved.pop(key, None)
            self._pool.set_generation(entry.offset, entry.generation)
            self._buffer.unpin(entry)
            self._buffer.touch(entry, time.monotonic())
            self._buffer.counters["stored"] += 1
            self._buffer.counters["stored_bytes"] += entry.nbytes
        self._offer(entry)
        if self._hasher is not None and self._peer_checks and entry.state == READY:
            self._hashing[key] = entry
            self._buffer.pin(entry)
            self._hasher.submit(Running(entry), entry.offset, entry.nbytes, is_last=True)

    def on_hashed(self, running: Running) -> None:
        """An entry's checksum is known."""
        entry: Entry = running.token
        entry.checksum = running.digest
        self._buffer.unpin(entry)
        self._buffer.counters["checksums"] += 1
        if self._hashing.get(entry.key) is entry:
            del self._hashing[entry.key]
            waiting = self._unconfirmed.pop(entry.key, None)
            if waiting is not None:
                self._read_done(waiting)

    def _offer(self, entry: Entry) -> None:
        if not self._peer.up:
            return
        if not self._peer_maps:  # a peer that maps the pool sees for itself whether an entry is still there
            if entry.key not in self._reading:
                self._buffer.pin(entry)
            self._reading[entry.key] = (entry, time.monotonic() + READ_PIN_S)
        address = self._pool.address + entry.offset
        self._send(Ready(entry.key, entry.generation, address, entry.nbytes, entry.ready_nbytes))

    def _answer(self, key: bytes) -> None:
        entry = self._buffer.get(key)
        if entry is None:
            self._send(Absent(key))
        elif entry.ready_nbytes:
            self._offer(entry)
        else:
            self._send(Announce(key, entry.nbytes))

    def _read_done(self, message: ReadDone) -> None:
        entry = self._buffer.get(message.key)
        self._peer_checks = message.wants_checksum
        if message.wants_checksum and message.key in self._hashing:
            self._unconfirmed[message.key] = message
            return
        valid = entry is not None and entry.generation == message.generation and entry.state in (READY, HELD)
        if valid and entry is not None:
            entry.state = HELD
            self._held_by_peer.add(message.key)
            self._buffer.counters["delivered"] += 1
        self._unpin(message.key)
        self._send(Confirmed(message.key, message.generation, valid, entry.checksum if valid and entry else None))

    def _used(self, message: Used) -> None:
        """The peer has copied an entry out of this pool: it needs no pin, and is recent."""
        self._peer_checks, self._peer_maps = False, True
        entry = self._buffer.get(message.key)
        if entry is None or entry.generation != message.generation:
            return
        if entry.state == READY:
            entry.state = HELD
            self._buffer.counters["delivered"] += 1
        self._buffer.touch(entry, time.monotonic())
        self._unpin(message.key)

    def _unpin(self, key: bytes) -> None:
        pinned = self._reading.pop(key, None)
        if pinned is not None:
            self._buffer.unpin(pinned[0])

    def _abort(self, key: bytes) -> None:
        entry = self._buffer.get(key)
        if entry is not None and entry.state == RESERVED:
            self._drop_reservation(entry)
            self._tell_dropped()

    def _drop_reservation(self, entry: Entry) -> None:
        self._reserved.pop(entry.key, None)
        self._buffer.remove(entry, LOST)
        self._buffer.unpin(entry)

    def _tell_dropped(self) -> None:
        for key in self._buffer.take_dropped():
            self._unpin(key)
            if key not in self._held_by_peer:
                self._send(Withdrawn(key))
