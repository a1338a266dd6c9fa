"""The agent's end of the worker socket, used by a worker that is out of its mind: refused or ended, never hung or grown."""

from __future__ import annotations

import math
import random
import socket
from typing import Iterator

import psutil
import pytest

from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.metadata.store import open_store
from mooncake_v0.pin.processes import find_free_range
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.agent_settings import AgentSettings
from mooncake_v0.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Commit,
    Message,
    PeerPool,
    PeerPoolMapped,
    Poll,
    Release,
    Reserve,
    Reserved,
    Select,
    Status,
    WorkerStatus,
    WorkerStatusRequest,
    decode_worker,
    encode,
)
from tests.transfer.conftest import MIB, key, open_descriptors, wait_until

Capture = pytest.CaptureFixture[str]
HUGE = (1 << 63) - 1
CALL = 77
ANSWER_S = 30.0


class BareAgent(AgentClient):
    """A real agent whose worker is this test. A new one is started when the last one has ended."""

    def __init__(self, role: str, config: MooncakeConfig) -> None:
        super().__init__(AgentSettings(role, 0, 1, config, {"model": "m"}, 8 * MIB))  # type: ignore[arg-type]
        self.ends: list[int] = []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def begin(self, *, wait_for_peer: bool = True) -> None:
        self.sock = self._spawn()
        self.sock.settimeout(ANSWER_S)
        assert isinstance(decode_worker(self.sock.recv(MAX_MESSAGE_BYTES)), WorkerStatus)
        if wait_for_peer:
            wait_until(lambda: self.ask_status().peer_epoch, "the agent has its peer")

    def ask_status(self) -> Status:
        self.sock.send(encode(WorkerStatusRequest(CALL)))
        answer = decode_worker(self.sock.recv(MAX_MESSAGE_BYTES))
        assert isinstance(answer, WorkerStatus)
        return answer.status

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def say(self, data: bytes) -> None:
        """Send, and wait until the agent has either gone on to answer the next question or has ended."""
        if not self.is_running():
            self.begin()
        try:
            self.sock.send(data)
            self.sock.send(encode(WorkerStatusRequest(CALL)))
            while True:
                answer = self.sock.recv(MAX_MESSAGE_BYTES)
                if not answer:
                    break
                message = decode_worker(answer)
                if isinstance(message, WorkerStatus) and message.call == CALL:
                    return
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert self._process is not None
        self.ends.append(self._process.wait(ANSWER_S))
        self.sock.close()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.sock.close()
        self.pool.close()


@pytest.fixture(params=["prefill", "decode"])
def agent(request: pytest.FixtureRequest, metadata_url: str) -> Iterator[BareAgent]:
    """An agent of this role, whose peer has a sane worker."""
    base = find_free_range(150)
    config = MooncakeConfig(Endpoint("127.0.0.1", base), Endpoint("127.0.0.1", base + 100), metadata_url, "tcp")
    attacked = BareAgent(request.param, config)
    peer = BareAgent("decode" if request.param == "prefill" else "prefill", config)
    peer.begin(wait_for_peer=False)
    yield attacked
    for each in (attacked, peer):
        each.end()


NONSENSE: dict[str, Message] = {  # tests/unit/transfer/test_worker_checks.py has every kind of it
    "negative size": Reserve(1, [key(1)], [-4096]),
    "more committed than reserved": Commit([key(2)], [HUGE >> 20]),
    "wait for no number": Select(1, [key(3)], math.nan),
    "commit of what nobody reserved": Commit([key(99)], [4096]),
    "abort of what nobody reserved": Abort([key(98)]),
    "release of what nobody selected": Release([key(97)] * 100, {}),
    "call that is negative": WorkerStatusRequest(-HUGE),
    "answer": Reserved(1, [0], [""]),
    "pool that nobody offered": PeerPoolMapped(-5),
    "offer of a pool": PeerPool(1, 4096),
}


def assert_clean(agent: BareAgent, log: str) -> None:
    """Whatever ended, ended as it should: no signal, no traceback; and what is left of it does its work."""
    assert "Traceback" not in log, log[-3000:]
    assert set(agent.ends) <= {1}, agent.ends
    agent.say(encode(WorkerStatusRequest(1)))
    assert agent.is_running()


def test_nonsense_of_a_worker_ends_its_agent_or_is_refused(agent: BareAgent, capfd: Capture) -> None:
    for message in NONSENSE.values():
        agent.say(encode(Reserve(1, [key(2)], [4096])))
        agent.say(encode(message))

    assert len(agent.ends) >= 2
    assert_clean(agent, capfd.readouterr().err)


def test_bytes_that_are_no_message_end_the_agent_and_its_keys_go(agent: BareAgent, capfd: Capture) -> None:
    store = open_store(agent.settings.config.metadata_server)
    name = agent.settings.ports.segment_name
    agent.begin()
    wait_until(lambda: store.get(f"mooncake/ram/{name}") is not None, "the agent publishes its keys")

    agent.say(b"\xc1 not a message")

    assert agent.ends == [1]
    assert [entry.key for entry in store.list("") if name in entry.key] == []
    for data in (b"\x00", random.Random(5).randbytes(100_000)):
        agent.say(data)
    assert_clean(agent, capfd.readouterr().err)


def test_ten_thousand_messages_in_any_order_leave_the_agent_as_it_was(agent: BareAgent, capfd: Capture) -> None:
    """Those that a worker may say, with keys and sizes that do not belong together. Nobody reads the answers meanwhile."""
    numbers = random.Random(9)
    agent.begin()
    agent.say(encode(WorkerStatusRequest(1)))
    process = psutil.Process(agent.pid)
    before, descriptors = process.memory_info().rss, open_descriptors(agent.pid)

    for _ in range(50):
        for _ in range(200):
            agent.sock.send(encode(a_message(numbers)))
            drain(agent.sock)
        agent.say(encode(WorkerStatusRequest(1)))

    assert agent.is_running() and agent.ends == []
    assert process.memory_info().rss - before < 32 * MIB
    assert open_descriptors(agent.pid) <= descriptors + 4
    assert_clean(agent, capfd.readouterr().err)


def a_message(numbers: random.Random) -> Message:
    names = [key(numbers.randrange(40)) for _ in range(numbers.randrange(1, 4))]
    many = [numbers.choice((1, 4096, 100_000, 9 * MIB)) for _ in names]
    messages: list[Message] = [
        Reserve(1, names, many),
        Commit(names, [1] * len(names)),
        Abort(names),
        Release(names, {f"counter {numbers.randrange(1 << 40)}": 1.0}),
        Select(1, names, numbers.choice((0.0, 0.001))),
        Poll(1, names, 0.0, [b""] * len(names)),
        PeerPoolMapped(numbers.randrange(-1, 3)),
    ]
    return numbers.choice(messages)


def drain(sock: socket.socket) -> None:
    sock.setblocking(False)
    try:
        while sock.recv(MAX_MESSAGE_BYTES):
            pass
    except BlockingIOError:
        pass
    finally:
        sock.settimeout(ANSWER_S)
