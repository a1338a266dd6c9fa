"""Two engines of decode's agent read at the same time: nothing is mixed up, whichever part comes first."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from typing import Any, Sequence

import pytest
import xxhash

from mooncake_v0.config.model import Endpoint, MooncakeConfig, Role
from mooncake_v0.errors import EngineError
from mooncake_v0.metadata.store import open_store
from mooncake_v0.pin.processes import find_free_range
from mooncake_v0.transfer.agent_settings import (
    CUDA_IPC,
    MIN_CPUS_FOR_TWO_READERS,
    OFF,
    ON,
    ONE,
    TWO,
    AgentSettings,
)
from mooncake_v0.transfer.checksums import PART_BYTES, Cost, Hasher
from mooncake_v0.transfer.decode_side import DecodeSide
from mooncake_v0.transfer.engine_thread import EngineThread, ReadJob, ReadResult, SecondReader
from mooncake_v0.transfer.key_keeper import ENGINE_PREFIXES
from mooncake_v0.transfer.lookup_buffer import LookupBuffer
from mooncake_v0.transfer.messages import Announce, Confirmed, Message, Poll, Polled, Ready, Select, Selected
from mooncake_v0.transfer.peer import Peer
from mooncake_v0.transfer.pool import Pool
from tests.transfer import conftest
from tests.transfer.conftest import MIB, Agents, MakeAgents, agent_pid, key, listening_addresses, wait_until

POOL_BYTES = 4 * PART_BYTES
NBYTES = 3 * PART_BYTES + 17


def has_second_reader(agents: Agents) -> bool:
    ports = agents.decode.settings.second_reader_ports
    return ports is not None and ports.data in {port for _, port in listening_addresses(agent_pid(agents.decode))}


def move(agents: Agents, number: int, data: bytes) -> bytes | str:
    start = agents.prefill.reserve([key(number)], [len(data)]).offsets[0]
    agents.prefill.pool.map[start : start + len(data)] = data
    agents.prefill.commit([key(number)], [len(data)])
    return agents.fetch(number, wait_s=20.0)


@pytest.mark.parametrize("checksum", [ON, OFF])
def test_entries_of_many_parts_arrive_as_they_were_sent(make_agents: MakeAgents, checksum: str) -> None:
    agents = make_agents(readers=TWO, checksum=checksum, pool_nbytes=POOL_BYTES)
    agents.wait_connected()
    wait_until(lambda: has_second_reader(agents), "the second engine listens")

    for number in range(1, 4):
        data = random.Random(number).randbytes(MIB) * (NBYTES // MIB) + os.urandom(NBYTES % MIB)
        assert move(agents, number, data) == data

    assert agents.decode.status().counters["reads"] == 3 * 4
    assert agents.decode.restarts == 0


def test_the_second_engine_is_not_published(make_agents: MakeAgents) -> None:
    agents = make_agents(readers=TWO)
    agents.wait_connected()
    wait_until(lambda: has_second_reader(agents), "the second engine listens")
    ports = agents.decode.settings.second_reader_ports
    assert ports is not None
    store = open_store(agents.decode.settings.config.metadata_server)

    wait_until(lambda: not any(store.get(prefix + ports.segment_name) for prefix in ENGINE_PREFIXES), "no keys")


def test_without_its_ports_one_engine_reads_alone(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    base = find_free_range(150)
    monkeypatch.setattr(conftest, "find_free_range", lambda count: base)
    with socket.create_server(("127.0.0.1", base + 100 + 17)):
        agents = make_agents(readers=TWO)
        agents.wait_connected()
        data = os.urandom(MIB) * 20

        assert move(agents, 1, data) == data

    assert agents.decode.restarts == 0


def test_who_has_a_second_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MooncakeConfig(Endpoint("h", 1000), Endpoint("h", 2000), "http://h:1/metadata", "tcp")

    def port(cpus: int, role: Role = "decode", tp_size: int = 1, **changes: Any) -> int | None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
        ports = AgentSettings(role, 1, tp_size, config, {}, MIB, **changes).second_reader_ports
        return None if ports is None else ports.handshake

    many = MIN_CPUS_FOR_TWO_READERS
    assert port(many) == port(2, readers=TWO) == port(many, tp_size=8) == 2018
    for nobody in (
        port(many - 1),
        port(many, readers=ONE),
        port(many, "prefill"),
        port(many, tp_size=9),
        port(many, transport=CUDA_IPC),
    ):
        assert nobody is None


class Barrier:
    """An engine whose reads end when another one reads too."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def read(self, segment_name: str, local_address: int, remote_address: int, nbytes: int) -> None:
        try:
            self._both.wait(20)
        except threading.BrokenBarrierError:
            raise EngineError("nobody else reads") from None

    def close(self) -> None:
        pass


def test_both_read_at_the_same_time_and_both_end() -> None:
    both = threading.Barrier(2)
    first = EngineThread(lambda: Barrier(both))
    second = SecondReader(first, lambda: Barrier(both))
    for number in range(8):
        first.submit(ReadJob(number, "peer", 0, 0, 1))
    first.start()
    second.start()

    results: list[ReadResult] = []
    wait_until(
        lambda: results.extend(r for r in first.take_results() if isinstance(r, ReadResult)) or len(results) == 8
    )

    assert sorted(result.job.token for result in results) == list(range(8))
    assert not any(result.error for result in results)
    first.stop(10)
    second.join(10)
    assert not first.is_alive() and not second.is_alive()


def decode_side(pool: Pool, hasher: Hasher, jobs: list[ReadJob], buffer: LookupBuffer, **options: Any) -> DecodeSide:
    """Without sockets and engine; jobs: what it would read."""
    return DecodeSide(
        buffer, Peer(up=True), pool, send=lambda message: None, submit=jobs.append, cancel=lambda: [], hasher=hasher,
        **{"readers": 2, "may_stop_checking": False, **options},
    )  # fmt: skip


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_only_what_has_no_gap_before_it_is_here(order: Sequence[int]) -> None:
    pool = Pool.create(POOL_BYTES)
    pool.map[:NBYTES] = data = random.Random(1).randbytes(MIB) * (NBYTES // MIB) + bytes(NBYTES % MIB)
    jobs: list[ReadJob] = []
    hasher = Hasher(pool)
    hasher.start()
    buffer = LookupBuffer(pool.nbytes, ttl_s=1e9)
    side = decode_side(pool, hasher, jobs, buffer)
    side.on_peer(Announce(key(1), NBYTES))
    side.on_peer(Ready(key(1), 1, 0, NBYTES, NBYTES))
    assert [job.nbytes for job in jobs] == [PART_BYTES] * 3 + [17]

    here: set[int] = set()
    for at in order:
        side.on_read(ReadResult(jobs[at], 0.01, None))
        here.add(at)
        prefix = next(count for count in range(5) if count not in here)
        if prefix < 4:
            replies: list[Message] = []
            side.on_worker(Poll(1, [key(1)], 0.0, [b""]), replies.append)
            (polled,) = replies
            assert isinstance(polled, Polled) and polled.settled == [False]
            assert (polled.arriving[0].ready_nbytes if polled.arriving[0] else 0) == prefix * PART_BYTES

    side.on_peer(Confirmed(key(1), 1, True, xxhash.xxh3_64_intdigest(data)))
    wait_until(lambda: [side.on_hashed(one) for one in hasher.take_complete()] and side.in_flight == 0, "hashed")
    answers: list[Message] = []
    side.on_worker(Select(2, [key(1)], 0.0), answers.append)
    (selected,) = answers
    assert isinstance(selected, Selected) and selected.nbytes == [NBYTES] and buffer.counters["corrupt"] == 0
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
