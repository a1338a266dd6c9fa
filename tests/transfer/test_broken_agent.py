"""The worker's end of the agent socket, when the agent is out of its mind: given up and replaced, and the worker goes on."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
from typing import Callable, Iterator, Sequence

import pytest

from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.pin.processes import find_free_range
from mooncake_v0.transfer import agent_client
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.agent_settings import AgentSettings
from mooncake_v0.transfer.messages import Arriving, Message, PeerPool, Polled, Reserved, Selected, encode
from tests.transfer.conftest import MIB, key, wait_until

POOL_BYTES = 8 * MIB
HUGE = (1 << 63) - 1
THE_CALL = 1  # every call of a test is the client's first one

# A process in an agent's place: it greets, then answers every message with the same bytes, `times` times.
BROKEN_AGENT = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
answer, times = bytes.fromhex(sys.argv[2]), int(sys.argv[3])
sock.send(b"here I am")
while sock.recv(1 << 18):
    for _ in range(times):
        sock.send(answer)
"""
FOR_EVER = 1 << 40

Call = Callable[[AgentClient], object]


def reserve(client: AgentClient) -> object:
    return client.reserve([key(1)], [4096])


def select(client: AgentClient) -> object:
    return client.select([key(1)], 0.1)


def poll(client: AgentClient) -> object:
    return client.poll([key(1)], 0.1).settled


def selected(offset: int, nbytes: int, *, pool: int = 0) -> Selected:
    return Selected(THE_CALL, [offset], [nbytes], [""], [pool], [1])


ANSWERS: dict[str, tuple[Call, Message]] = {
    "offset beyond the pool": (reserve, Reserved(THE_CALL, [POOL_BYTES], [""])),
    "entry that reaches beyond the pool": (reserve, Reserved(THE_CALL, [POOL_BYTES - 1], [""])),
    "huge offset": (reserve, Reserved(THE_CALL, [HUGE], [""])),
    "negative offset": (reserve, Reserved(THE_CALL, [-4096], [""])),
    "offsets of two keys for one": (reserve, Reserved(THE_CALL, [0, 4096], ["", ""])),
    "no offset": (reserve, Reserved(THE_CALL, [], [])),
    "offset without a reason": (reserve, Reserved(THE_CALL, [0], [])),
    "answer to another question": (reserve, Polled(THE_CALL, [True], [False], [None])),
    "selected beyond the pool": (select, selected(POOL_BYTES, 4096)),
    "selected of a huge size": (select, selected(0, HUGE)),
    "selected of a negative size": (select, selected(4096, -1)),
    "selected of two keys for one": (select, Selected(THE_CALL, [0, 0], [1, 1], ["", ""], [0, 0], [1, 1])),
    "selected without pools": (select, Selected(THE_CALL, [0], [1], [""], [], [])),
    "polled nothing": (poll, Polled(THE_CALL, [], [], [])),
    "arriving beyond the pool": (poll, Polled(THE_CALL, [False], [False], [Arriving(POOL_BYTES, 1, 4096, 1)])),
    "pool on the wrong socket, of a size that no pool has": (poll, PeerPool(1, HUGE)),
}
BYTES: dict[str, tuple[Call, bytes]] = {
    "no message": (select, b"\xc1\xc1"),
    "random bytes": (reserve, random.Random(4).randbytes(10_000)),
    "a message that is cut off": (poll, encode(Polled(THE_CALL, [True], [False], [None]))[:-1]),
    "nested lists": (reserve, b"\x91" * 5000),
    **{name: (call, encode(message)) for name, (call, message) in ANSWERS.items()},
}


class Worker(AgentClient):
    """A worker whose first agents are broken ones; `real` is set when it gets a real one again."""

    def __init__(self, config: MooncakeConfig, broken: Sequence[tuple[bytes, int]]) -> None:
        super().__init__(AgentSettings("prefill", 0, 1, config, {"model": "m"}, POOL_BYTES))
        self._broken = list(broken)
        self.real = threading.Event()

    def _spawn(self) -> socket.socket:
        if not self._broken:
            self.real.set()
            return super()._spawn()
        answer, times = self._broken.pop(0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._events, self._their_events = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-ISc", BROKEN_AGENT, str(theirs.fileno()), answer.hex(), str(times)]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL)
        theirs.close()
        return ours


@pytest.fixture
def config(metadata_url: str) -> MooncakeConfig:
    base = find_free_range(150)
    return MooncakeConfig(Endpoint("127.0.0.1", base), Endpoint("127.0.0.1", base + 100), metadata_url, "tcp")


@pytest.fixture
def make_worker(config: MooncakeConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(agent_client, "_RESTART_PAUSES_S", (0.0,))
    made: list[Worker] = []

    def make(*broken: tuple[bytes, int]) -> Worker:
        made.append(Worker(config, broken))
        made[-1].start()
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def wait_for_agent(worker: Worker, restarts: int) -> None:
    wait_until(lambda: worker.running and worker.restarts == restarts, f"agent number {restarts + 1}")
    worker._calls = THE_CALL - 1
    worker.pool.has_peer = True  # or the worker would not ask


def test_nonsense_of_an_agent_is_no_answer_and_the_worker_gets_another_one(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker(*((data, 1) for _, data in BYTES.values()))

    for number, (name, (call, _)) in enumerate(BYTES.items()):
        wait_for_agent(worker, number)
        with pytest.raises(AgentUnavailableError):
            pytest.fail(f"{name} was taken: {call(worker)}")

    assert worker.real.wait(60)
    wait_for_agent(worker, len(BYTES))
    assert worker.status().role == "prefill"
    assert worker.restarts == len(BYTES)


def test_an_agent_that_never_stops_talking_holds_no_call_up(make_worker: Callable[..., Worker]) -> None:
    """Valid messages, none of them the answer, as fast as the worker can read them: the call ends at its deadline."""
    worker = make_worker((encode(Polled(THE_CALL + 1, [True], [False], [None])), FOR_EVER))
    wait_for_agent(worker, 0)

    with pytest.raises(AgentUnavailableError, match="no answer within"):
        worker.reserve([key(1)], [4096])

    assert worker.real.wait(60)


def test_what_a_broken_agent_offers_as_a_pool_is_not_mapped(make_worker: Callable[..., Worker]) -> None:
    """Without a descriptor, of a size that no pool has, and bytes that are no message."""
    offers = [encode(PeerPool(1, HUGE)), encode(PeerPool(-1, 4096)), b"\xc1"]
    worker = make_worker(*((b"", 0) for _ in offers))

    for number, offer in enumerate(offers):
        wait_for_agent(worker, number)
        worker._their_events.send(offer)
        wait_until(lambda: worker.restarts > number, "the agent is replaced")  # noqa: B023

    assert worker.peer_pool is None
    assert worker.real.wait(60)
