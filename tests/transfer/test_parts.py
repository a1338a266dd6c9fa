"""Entries larger than one read: part by part, in order, checked or not."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import xxhash

from mooncake_v0.transfer.agent_settings import OFF, ON
from mooncake_v0.transfer.checksums import Cost, Hasher
from mooncake_v0.transfer.decode_side import MIN_PART_BYTES, PART_BYTES, DecodeSide
from mooncake_v0.transfer.engine_thread import ReadJob, ReadResult
from mooncake_v0.transfer.lookup_buffer import LookupBuffer
from mooncake_v0.transfer.messages import Announce, Confirmed, Message, Poll, Polled, Ready, Select, Selected
from mooncake_v0.transfer.peer import Peer
from mooncake_v0.transfer.pool import Pool
from tests.transfer.conftest import MIB, Agents, MakeAgents, key, wait_until

POOL_BYTES = 4 * PART_BYTES
NBYTES = 3 * PART_BYTES + MIN_PART_BYTES


def move(agents: Agents, number: int, data: bytes) -> bytes | str:
    start = agents.prefill.reserve([key(number)], [len(data)]).offsets[0]
    agents.prefill.pool.map[start : start + len(data)] = data
    agents.prefill.commit([key(number)], [len(data)])
    return agents.fetch(number, wait_s=20.0)


@pytest.mark.parametrize("checksum", [ON, OFF])
def test_entries_of_many_parts_arrive_as_they_were_sent(make_agents: MakeAgents, checksum: str) -> None:
    agents = make_agents(checksum=checksum, pool_nbytes=POOL_BYTES)
    agents.wait_connected()

    for number in range(1, 4):
        data = random.Random(number).randbytes(MIB) * (NBYTES // MIB) + os.urandom(17)
        assert move(agents, number, data) == data

    assert agents.decode.status().counters["reads"] == 3 * 4
    assert agents.decode.restarts == 0


def decode_side(
    pool: Pool, hasher: Hasher | None, jobs: list[ReadJob], buffer: LookupBuffer, **options: Any
) -> DecodeSide:
    """Without sockets and engine; jobs: what it would read, the first of which has begun."""

    def cancel(transfer: object) -> list[ReadJob]:
        taken = [job for job in jobs[1:] if job.token is transfer]
        jobs[1:] = [job for job in jobs[1:] if job.token is not transfer]
        return taken

    return DecodeSide(
        buffer, Peer(up=True), pool, send=lambda message: None, submit=jobs.append, cancel=cancel, hasher=hasher,
        **{"may_stop_checking": False, **options},
    )  # fmt: skip


def test_a_worker_that_polls_hears_how_much_is_here() -> None:
    pool = Pool.create(POOL_BYTES)
    pool.map[:NBYTES] = data = random.Random(1).randbytes(MIB) * (NBYTES // MIB)
    jobs: list[ReadJob] = []
    hasher = Hasher(pool)
    hasher.start()
    buffer = LookupBuffer(pool.nbytes, ttl_s=1e9)
    side = decode_side(pool, hasher, jobs, buffer)
    side.on_peer(Announce(key(1), NBYTES))
    side.on_peer(Ready(key(1), 1, 0, NBYTES, NBYTES))
    assert [job.nbytes for job in jobs] == [PART_BYTES] * 3 + [MIN_PART_BYTES]

    for number, job in enumerate(jobs):
        replies: list[Message] = []
        side.on_worker(Poll(1, [key(1)], 0.0, [b""]), replies.append)
        (polled,) = replies
        assert isinstance(polled, Polled) and polled.settled == [False]
        assert (polled.arriving[0].ready_nbytes if polled.arriving[0] else 0) == number * PART_BYTES
        side.on_read(ReadResult(job, 0.01, None))

    side.on_peer(Confirmed(key(1), 1, True, xxhash.xxh3_64_intdigest(data)))
    wait_until(lambda: [side.on_hashed(one) for one in hasher.take_complete()] and side.in_flight == 0, "hashed")
    answers: list[Message] = []
    side.on_worker(Select(2, [key(1)], 0.0), answers.append)
    (selected,) = answers
    assert isinstance(selected, Selected) and selected.nbytes == [NBYTES] and buffer.counters["corrupt"] == 0
    pool.close()


@pytest.mark.parametrize(
    "nbytes, parts",
    [
        (17, [17]),
        (PART_BYTES + MIN_PART_BYTES - 1, [PART_BYTES + MIN_PART_BYTES - 1]),
        (2 * PART_BYTES + 17, [PART_BYTES, PART_BYTES + 17]),
        (2 * PART_BYTES + MIN_PART_BYTES, [PART_BYTES, PART_BYTES, MIN_PART_BYTES]),
    ],
)
def test_no_part_is_small_but_of_a_small_entry(nbytes: int, parts: list[int]) -> None:
    pool = Pool.create(POOL_BYTES)
    jobs: list[ReadJob] = []
    side = decode_side(pool, None, jobs, LookupBuffer(pool.nbytes, ttl_s=1e9))

    side.on_peer(Ready(key(1), 1, 0, nbytes, nbytes))

    assert [job.nbytes for job in jobs] == parts
    pool.close()


@pytest.mark.parametrize("is_peer_down", [False, True])
def test_a_failed_part_or_a_lost_peer_takes_the_others_back(is_peer_down: bool) -> None:
    pool = Pool.create(POOL_BYTES)
    jobs: list[ReadJob] = []
    buffer = LookupBuffer(pool.nbytes, ttl_s=1e9)
    side = decode_side(pool, None, jobs, buffer)
    for number, nbytes in ((1, NBYTES), (2, MIB)):
        side.on_peer(Announce(key(number), nbytes))
        side.on_peer(Ready(key(number), number, 0, nbytes, nbytes))

    if is_peer_down:
        side.on_peer_down()
    side.on_read(ReadResult(jobs[0], 5.0, "failed"))

    assert [job.nbytes for job in jobs[1:]] == ([] if is_peer_down else [MIB])
    buffer.clear_some(POOL_BYTES)
    assert (side.in_flight, buffer.used_bytes) == ((0, 0) if is_peer_down else (1, MIB))
    pool.close()


def test_entries_under_way_when_checksums_end_are_used_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cost, "add", lambda *args: True)
    pool = Pool.create(POOL_BYTES)
    jobs: list[ReadJob] = []
    hasher = Hasher(pool)
    hasher.start()
    side = decode_side(pool, hasher, jobs, LookupBuffer(pool.nbytes, ttl_s=1e9), may_stop_checking=True)
    for number in (1, 2):
        side.on_peer(Announce(key(number), MIB))
        side.on_peer(Ready(key(number), number, 0, MIB, MIB))

    def end(number: int) -> None:
        side.on_read(ReadResult(jobs[number - 1], 0.01, None))
        side.on_peer(Confirmed(key(number), number, True, xxhash.xxh3_64_intdigest(bytes(MIB))))
        wait_until(lambda: [side.on_hashed(one) for one in hasher.take_complete()] or side.in_flight == 2 - number)

    end(1)  # from now on there are no checksums
    end(2)
    pool.close()
