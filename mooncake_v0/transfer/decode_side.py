"""Decode's half of an agent: fetches announced entries in the background and pins them for its worker.

An entry is HELD, and only then given to the worker, when all its bytes were read and the peer has confirmed afterwards
that it had not reused the region meanwhile. The worker's `Select` waits for entries in flight up to its deadline; a key
that nobody announced is asked of the peer once, which costs one round trip and settles every race of announcement and
request. A request that came together with its prefill leg, as one handoff, is not asked about while that leg lives: it will
be announced. Where the peer's pool is mapped (`MappedEntries`), nothing is fetched: its entries are used where they lie.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Callable

from mooncake_v0.transfer.checksums import Cost, Hasher, Running
from mooncake_v0.transfer.engine_thread import ReadJob, ReadResult
from mooncake_v0.transfer.lookup_buffer import FULL, HELD, LOST, TOO_LARGE, TRANSFERRING, Entry, LookupBuffer
from mooncake_v0.transfer.mapped_entries import MappedEntries
from mooncake_v0.transfer.messages import (
    MAX_KEYS,
    Absent,
    Announce,
    Arriving,
    Confirmed,
    Dropped,
    Ended,
    Message,
    PeerMessage,
    Poll,
    Polled,
    Query,
    ReadDone,
    ReadFailed,
    Ready,
    Release,
    Select,
    Selected,
    Used,
    Withdrawn,
)
from mooncake_v0.transfer.peer import NO_PEER, Peer
from mooncake_v0.transfer.pool import Pool

logger = logging.getLogger(__name__)

MIN_PART_BYTES = 16 << 20  # each read is a new tcp connection: few and large
PART_BYTES = 64 << 20  # small enough to hash and copy one while the next one is read
MAX_READS = 2  # of one entry, one of which waits; what is ready meanwhile becomes the next read
STALLED_S = 60.0  # a transfer without progress for so long is given up
QUERY_WAIT_S = 0.5  # for the peer's answer about a key that it did not announce

_REMEMBERED = 10_000

LATE = "late"  # reasons in Selected
UNKNOWN = "unknown"
FAILED = "failed"
CORRUPT = "corrupt"
NOT_MAPPED = "not_mapped"


@dataclass
class Transfer:
    """An entry on its way.

    asked_nbytes: leading bytes that a read was submitted for; ended_nbytes: of reads that have ended, however they did
    done_nbytes: leading bytes that are here
    reads: that have not ended
    running: its checksum, None without; confirmed: prefill's word on it, kept until the checksum is complete
    """

    entry: Entry
    progress_at_s: float
    offer: Ready | None = None
    asked_nbytes: int = 0
    ended_nbytes: int = 0
    done_nbytes: int = 0
    reads: int = 0
    read_s: float = 0.0
    read_ended_s: float = 0.0
    running: Running | None = None
    confirmed: Confirmed | None = None


@dataclass
class Waiter:
    """A Select or Poll that cannot be answered yet."""

    request: Select | Poll
    reply: Callable[[Message], None]
    deadline_s: float


class DecodeSide:
    """submit: hands a job to the thread that reads one after the other; cancel: takes back a transfer's that have not begun.

    hasher: None without checksums; may_stop_checking: whether they end when they cost too much
    """

    def __init__(
        self,
        buffer: LookupBuffer,
        peer: Peer,
        pool: Pool,
        *,
        send: Callable[[Message], None],
        submit: Callable[[ReadJob], None],
        cancel: Callable[[Transfer], list[ReadJob]],
        hasher: Hasher | None,
        may_stop_checking: bool,
    ) -> None:
        self._buffer = buffer
        self._peer = peer
        self._pool = pool
        self._send = send
        self._submit = submit
        self._cancel = cancel
        self._hasher = hasher
        self._cost = Cost() if may_stop_checking else None
        self._transfers: dict[bytes, Transfer] = {}
        self._queries: dict[bytes, float] = {}  # asked of the peer → when to stop waiting for its answer
        self._awaited: dict[bytes, bytes] = {}  # handoffs that prefill has not ended → key; at most _REMEMBERED
        self._ended: dict[bytes, None] = {}  # handoffs that it has; at most _REMEMBERED, the oldest first
        self._reasons: dict[bytes, str] = {}  # why a key will not come; at most _REMEMBERED
        self._waiters: list[Waiter] = []
        self._pinned: dict[bytes, list[Entry]] = {}  # by the worker
        self.mapped = MappedEntries(buffer.counters)
        self.can_read = True  # the peer's pool, over the network
        self.quarantined_bytes = 0

    @property
    def in_flight(self) -> int:
        """Entries on their way."""
        return len(self._transfers)

    # --- the worker ---------------------------------------------------------------------------------------------------

    def on_worker(self, message: object, reply: Callable[[Message], None]) -> None:
        if isinstance(message, (Select, Poll)):
            now_s = time.monotonic()
            handoffs = message.handoffs if isinstance(message, Poll) else [b""] * len(message.keys)
            for key, handoff in zip(message.keys, handoffs):
                if not self._await(key, handoff):
                    self._ask_if_unknown(key, now_s)
            self._waiters.append(Waiter(message, reply, now_s + message.wait_s))
            self._settle(now_s)
        elif isinstance(message, Release):
            for key in message.keys:
                self._release(key)

    def _release(self, key: bytes) -> None:
        entries = self._pinned.get(key)
        if entries:
            self._buffer.unpin(entries.pop())
            if not entries:
                del self._pinned[key]
            return
        mapped = self.mapped.get(key)
        if mapped is not None:
            self._send(Used(key, mapped.generation))

    def _await(self, key: bytes, handoff: bytes) -> bool:
        """Whether prefill's leg of this handoff lives. What was known of its key before does not count."""
        if not handoff or handoff in self._ended or not self._peer.up:
            return False
        if handoff not in self._awaited:
            if len(self._awaited) >= _REMEMBERED:
                del self._awaited[next(iter(self._awaited))]
            self._awaited[handoff] = key
            self._reasons.pop(key, None)
        return True

    def _end(self, handoffs: list[bytes]) -> None:
        """Prefill has ended these: what it has not announced by now will not come."""
        now_s = time.monotonic()
        for handoff in handoffs:
            self._ended[handoff] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
            key = self._awaited.pop(handoff, None)
            if key is not None:
                self._ask_if_unknown(key, now_s)

    def _is_awaited(self, key: bytes, handoff: bytes) -> bool:
        """Whether prefill's leg lives, and with it what it may announce or is computing."""
        if handoff not in self._awaited or key in self._reasons:
            return False
        entry = self._buffer.get(key)
        return self.mapped.get(key) is None and (entry is None or entry.state != HELD)

    def _ask_if_unknown(self, key: bytes, now_s: float) -> None:
        """A key that nobody announced is asked of the peer, once for a while."""
        if self._buffer.get(key) is not None or key in self._queries or not self._peer.up:
            return
        if self.mapped.get(key) is not None or self.mapped.is_expected(key):
            return
        if self._reasons.get(key) in (TOO_LARGE, FULL):
            return
        self._reasons.pop(key, None)
        self._queries[key] = now_s + QUERY_WAIT_S
        self._send(Query(key))

    def _is_settled(self, key: bytes, now_s: float) -> bool:
        """Whether nothing more is to be expected for this key soon: it is here, or known not to come."""
        entry = self._buffer.get(key)
        if entry is not None and entry.state == HELD:
            return True
        if self.mapped.get(key) is not None:
            return True
        if entry is not None or self.mapped.is_expected(key):
            return False
        return now_s >= self._queries.get(key, 0.0)

    def _tell_news(self, now_s: float) -> None:
        """Something may be settled: answer those who wait, and let a worker that does not wait ask again."""
        self._pool.add_news()
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Answer every waiter whose answer is known or whose time is over."""
        for waiter in list(self._waiters):
            if isinstance(waiter.request, Poll):
                self._answer_poll(waiter, waiter.request, now_s)
            elif now_s >= waiter.deadline_s or all(self._is_settled(key, now_s) for key in waiter.request.keys):
                self._waiters.remove(waiter)
                waiter.reply(self._answer(waiter.request, now_s))

    def _answer_poll(self, waiter: Waiter, poll: Poll, now_s: float) -> None:
        awaited = [self._is_awaited(key, handoff) for key, handoff in zip(poll.keys, poll.handoffs)]
        settled = [not waits and self._is_settled(key, now_s) for key, waits in zip(poll.keys, awaited)]
        if any(settled) or now_s >= waiter.deadline_s:
            self._waiters.remove(waiter)
            waiter.reply(Polled(poll.call, settled, awaited, [self._arriving(key) for key in poll.keys]))

    def _arriving(self, key: bytes) -> Arriving | None:
        transfer = self._transfers.get(key)
        if transfer is None or not transfer.done_nbytes:
            return None
        entry = transfer.entry
        return Arriving(entry.offset, entry.generation, entry.nbytes, transfer.done_nbytes)

    def _answer(self, select: Select, now_s: float) -> Selected:
        selected = Selected(select.call, [], [], [], [], [])
        for key in select.keys:
            offset, nbytes, reason, pool, generation = self._locate(key, now_s)
            selected.offsets.append(offset)
            selected.nbytes.append(nbytes)
            selected.reasons.append(reason)
            selected.pools.append(pool)
            selected.generations.append(generation)
        return selected

    def _locate(self, key: bytes, now_s: float) -> tuple[int, int, str, int, int]:
        """An entry's offset, size, reason, pool and generation; pinned if it lies in our own pool."""
        entry, mapped = self._buffer.get(key), self.mapped.get(key)
        if entry is not None and entry.state == HELD:
            self._buffer.pin(entry)
            self._buffer.touch(entry, now_s)
            self._pinned.setdefault(key, []).append(entry)
            return entry.offset, entry.nbytes, "", 0, entry.generation
        if mapped is not None:
            return mapped.offset, mapped.nbytes, "", self.mapped.number, mapped.generation
        if entry is not None or self.mapped.is_expected(key):
            return -1, 0, LATE, 0, 0
        return -1, 0, self._reasons.get(key, UNKNOWN if self._peer.up else NO_PEER), 0, 0

    def _close_key(self, key: bytes, reason: str) -> None:
        """This key will not come."""
        self._queries.pop(key, None)
        if len(self._reasons) >= _REMEMBERED:
            self._reasons.clear()
        self._reasons[key] = reason

    # --- the peer -----------------------------------------------------------------------------------------------------

    def on_peer(self, message: PeerMessage) -> None:
        now_s = time.monotonic()
        if isinstance(message, Announce):
            if not self._is_mapped(message.key) and not self.can_read:
                self._close_key(message.key, NOT_MAPPED)
            elif not self._is_mapped(message.key):
                self._expect(message.key, message.nbytes, now_s)
            else:
                self._queries.pop(message.key, None)
                self.mapped.expect(message.key, now_s)
        elif isinstance(message, Ready):
            self._take_offer(message, now_s)
        elif isinstance(message, Confirmed):
            self._confirmed(message)
        elif isinstance(message, Withdrawn):
            self.mapped.forget(message.key)
            self._give_up(message.key, FAILED)
        elif isinstance(message, Absent):
            self._close_key(message.key, UNKNOWN)
        elif isinstance(message, Ended):
            self._end(message.handoffs)
        self._tell_news(now_s)

    def on_peer_up(self) -> None:
        self._reasons.clear()

    def on_peer_down(self) -> None:
        """The peer's epoch ended: what it stored is not what a successor would store."""
        for key in list(self._transfers):
            self._give_up(key, NO_PEER)
        self.mapped.deactivate()
        for entry in self._buffer:
            self._buffer.remove(entry, LOST)
        self._buffer.take_dropped()
        self._queries.clear()
        self._awaited.clear()
        self._reasons.clear()
        self._tell_news(time.monotonic())

    def tick(self, now_s: float) -> None:
        for key, transfer in list(self._transfers.items()):
            if now_s - transfer.progress_at_s > STALLED_S:
                self._give_up(key, FAILED)
        for key in [key for key, deadline_s in self._queries.items() if now_s >= deadline_s]:
            del self._queries[key]
        self.mapped.tick(now_s)
        self._buffer.expire(now_s)
        self._tell_dropped()
        self._tell_news(now_s)

    def answer_in_time(self, now_s: float) -> None:
        """Answer those whose time is over; called between two ticks."""
        deadline_s = self.next_deadline_s()
        if deadline_s is not None and now_s >= deadline_s:
            self._settle(now_s)

    def next_deadline_s(self) -> float | None:
        """When a waiter or a query ends; None while nobody waits."""
        if not self._waiters:
            return None
        now_s = time.monotonic()
        queries = [deadline for deadline in self._queries.values() if deadline > now_s]
        return min([waiter.deadline_s for waiter in self._waiters] + queries)

    def _expect(self, key: bytes, nbytes: int, now_s: float) -> Transfer | None:
        """The transfer of an announced key, with its space; None when it is here already or has no space."""
        if key in self._transfers:
            return self._transfers[key]
        if self._buffer.get(key) is not None:
            return None
        made = self._buffer.insert(key, nbytes, now_s)
        self._tell_dropped()
        if isinstance(made, str):
            self._close_key(key, made)
            return None
        self._queries.pop(key, None)
        self._reasons.pop(key, None)
        transfer = self._transfers[key] = Transfer(made, now_s)
        return transfer

    def _is_mapped(self, key: bytes) -> bool:
        """Whether an announced key is to be used in the peer's pool: not if it came, or comes, before that was mapped."""
        return bool(self.mapped.number) and self._buffer.get(key) is None

    def _take_offer(self, offer: Ready, now_s: float) -> None:
        if self._is_mapped(offer.key) and self.mapped.offer(offer, now_s):
            self._queries.pop(offer.key, None)
            self._reasons.pop(offer.key, None)
        else:
            self._fetch(offer, now_s)

    def _fetch(self, offer: Ready, now_s: float) -> None:
        held = self._buffer.get(offer.key)
        if held is not None and held.state == HELD:
            self._send(ReadDone(offer.key, offer.generation))
            return
        if not self.can_read:
            self._send(ReadFailed(offer.key, offer.generation))
            self._close_key(offer.key, NOT_MAPPED)
            return
        transfer = self._expect(offer.key, offer.nbytes, now_s)
        if transfer is None or transfer.entry.nbytes != offer.nbytes:
            self._send(ReadFailed(offer.key, offer.generation))
            return
        if transfer.offer is not None and transfer.offer.generation != offer.generation:
            return  # a read of the earlier generation is under way; its confirmation will fail and end the transfer
        if self._hasher is not None and transfer.offer is None:
            transfer.running = Running(transfer)
        transfer.offer = offer
        transfer.entry.state = TRANSFERRING
        transfer.progress_at_s = now_s
        self._read_on(transfer, offer)

    def _read_on(self, transfer: Transfer, offer: Ready) -> None:
        """Ask for what is ready and was not asked for."""
        nbytes = offer.ready_nbytes - transfer.asked_nbytes
        if transfer.reads >= MAX_READS or nbytes <= 0:
            return
        if nbytes < MIN_PART_BYTES and offer.ready_nbytes < offer.nbytes:
            return
        while transfer.asked_nbytes < offer.ready_nbytes:
            start = transfer.asked_nbytes
            left = offer.ready_nbytes - start
            part = PART_BYTES if left >= PART_BYTES + MIN_PART_BYTES else left
            transfer.asked_nbytes += part
            transfer.reads += 1
            local = self._pool.address + transfer.entry.offset + start
            self._submit(ReadJob(transfer, self._peer.segment_name, local, offer.address + start, part))

    def on_read(self, result: ReadResult) -> None:
        """A read ended. The last one asks the peer to confirm that the bytes were good all along."""
        transfer: Transfer = result.job.token
        entry = transfer.entry
        now_s = time.monotonic()
        transfer.progress_at_s = now_s
        transfer.reads -= 1
        transfer.read_s += result.seconds
        if result.error is not None:
            self._read_failed(transfer, result)
            self._tell_news(now_s)
            return
        transfer.ended_nbytes += result.job.nbytes
        self._buffer.counters["read_bytes"] += result.job.nbytes
        self._buffer.counters["reads"] += 1
        self._buffer.counters["read_us"] += round(result.seconds * 1e6)
        if self._transfers.get(entry.key) is not transfer:  # given up meanwhile
            self._unpin_if_idle(transfer)
            return
        self._part_is_here(transfer, result.job.nbytes)
        if transfer.done_nbytes == entry.nbytes and transfer.offer is not None:
            transfer.read_ended_s = now_s
            self._send(ReadDone(entry.key, transfer.offer.generation, transfer.running is not None))
        elif transfer.offer is not None:
            self._read_on(transfer, transfer.offer)
        self._pool.add_news()  # a worker may copy on what has come

    def _part_is_here(self, transfer: Transfer, nbytes: int) -> None:
        start, entry = transfer.done_nbytes, transfer.entry
        transfer.done_nbytes += nbytes
        if self._hasher is not None and transfer.running is not None:
            self._hasher.submit(transfer.running, entry.offset + start, nbytes, transfer.done_nbytes == entry.nbytes)

    def _read_failed(self, transfer: Transfer, result: ReadResult) -> None:
        logger.warning("%s", result.error)
        self._buffer.counters["read_failed"] += 1
        if result.may_write_later:
            # never unpinned: the engine may still write into this region until this process ends
            self.quarantined_bytes += transfer.entry.nbytes
            self._buffer.pin(transfer.entry)
        transfer.ended_nbytes += result.job.nbytes
        if self._transfers.get(transfer.entry.key) is transfer:
            if transfer.offer is not None:
                self._send(ReadFailed(transfer.entry.key, transfer.offer.generation))
            self._give_up(transfer.entry.key, FAILED)
        else:
            self._unpin_if_idle(transfer)

    def _confirmed(self, message: Confirmed) -> None:
        transfer = self._transfers.get(message.key)
        if transfer is None or transfer.offer is None or transfer.offer.generation != message.generation:
            return
        if not message.valid or transfer.done_nbytes != transfer.entry.nbytes:
            self._give_up(message.key, FAILED)
            return
        transfer.confirmed = message
        self._finish(transfer)

    def on_hashed(self, running: Running) -> None:
        transfer: Transfer = running.token
        if self._transfers.get(transfer.entry.key) is transfer:
            self._finish(transfer)
            self._tell_news(time.monotonic())

    def _finish(self, transfer: Transfer) -> None:
        """The entry may be used, once prefill has confirmed it and its checksum, if there is one, is that of prefill."""
        confirmed, running, key = transfer.confirmed, transfer.running, transfer.entry.key
        if confirmed is None or (running is not None and running.digest is None):
            return
        if running is not None and confirmed.checksum is not None:
            self._buffer.counters["checked"] += 1
            self._weigh(transfer)
            if running.digest != confirmed.checksum:
                self._buffer.counters["corrupt"] += 1
                logger.error("an entry of %d bytes arrived with another checksum: not used", transfer.entry.nbytes)
                self._give_up(key, CORRUPT)
                return
        del self._transfers[key]
        transfer.entry.state = HELD
        self._buffer.unpin(transfer.entry)
        self._buffer.counters["received"] += 1

    def _weigh(self, transfer: Transfer) -> None:
        """Stop checking where it costs too much."""
        if self._cost is not None and self._cost.add(transfer.read_s, transfer.read_ended_s):
            logger.info("checksums end: they make entries ready later by %s", self._cost)
            self._hasher = self._cost = None
            for other in self._transfers.values():
                other.running = None

    def _give_up(self, key: bytes, reason: str) -> None:
        """End a transfer; its bytes are freed when no read of it is under way any more."""
        transfer = self._transfers.pop(key, None)
        self._close_key(key, reason)
        if transfer is None:
            return
        self._buffer.remove(transfer.entry, LOST)
        self._buffer.take_dropped()
        transfer.ended_nbytes += sum(job.nbytes for job in self._cancel(transfer))
        self._unpin_if_idle(transfer)

    def _unpin_if_idle(self, transfer: Transfer) -> None:
        if transfer.ended_nbytes == transfer.asked_nbytes:
            self._buffer.unpin(transfer.entry)

    def _tell_dropped(self) -> None:
        dropped = self._buffer.take_dropped()
        for start in range(0, len(dropped), MAX_KEYS):
            self._send(Dropped(dropped[start : start + MAX_KEYS]))
