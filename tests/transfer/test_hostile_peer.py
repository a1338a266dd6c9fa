"""A hostile peer at the side channel: no crash, no growth, no effect on the true peer."""

from __future__ import annotations

import contextlib
import pickle
import random
import resource
import socket
from pathlib import Path
from typing import Any, Iterator

import psutil
import pytest
import zmq

from mooncake_v0.transfer.messages import (
    PROTOCOL_VERSION,
    Absent,
    Announce,
    Confirmed,
    Dropped,
    Hello,
    Message,
    Ping,
    Query,
    ReadDone,
    ReadFailed,
    Ready,
    Refused,
    Used,
    Welcome,
    Withdrawn,
    encode,
)
from tests.transfer.conftest import MIB, Agents, agent_pid, key, open_descriptors, wait_until


class Evil:
    """Unpickling this would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture(params=["prefill", "decode"])
def attacked(request: pytest.FixtureRequest, shared_agents: Agents) -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    """The role of an agent and an unwelcome connection to its listener."""
    client = shared_agents.prefill if request.param == "prefill" else shared_agents.decode
    ports = client.settings.ports
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(f"tcp://{ports.host}:{ports.side_channel}")
        yield request.param, sock


def assert_unharmed(agents: Agents, seed: int) -> None:
    """The true pair still moves entries, with the processes that it had."""
    assert (agents.prefill.restarts, agents.decode.restarts) == (0, 0)
    assert agents.store(seed, MIB, fill=seed % 251) in ("", "held", "exists")
    assert agents.fetch(seed) == bytes([seed % 251]) * MIB


def test_bytes_and_pickles_are_rejected_and_counted(
    shared_agents: Agents, attacked: tuple[str, zmq.Socket[bytes]], tmp_path: Path
) -> None:
    role, sock = attacked
    status = shared_agents.status(role)
    assert status is not None
    before = status.counters["rejected_messages"]
    made = tmp_path / "made"
    junk = [pickle.dumps(Evil(made)), b"", b"\x00" * 1000, b"\xc1", random.Random(1).randbytes(4096)]

    for data in junk * 20:
        sock.send(data)
    sock.send_multipart([b"two", b"frames"])

    wait_until(lambda: shared_agents.status(role).counters["rejected_messages"] >= before + 101)  # type: ignore[union-attr]
    assert not made.exists()
    assert_unharmed(shared_agents, seed=5001)


HELLO = Hello(PROTOCOL_VERSION, "decode", 0, 1, "forged", "1.2.3.4:5", "digest", {"model": "m"})
OUT_OF_TURN: list[Message] = [
    HELLO,
    Welcome(PROTOCOL_VERSION, "prefill", 0, 1, "forged", "1.2.3.4:5", "digest", {"model": "m"}),
    Refused("model", "a", "b"),
    Ping("forged"),
    Announce(key(7), 1 << 40),
    Ready(key(7), 1, 1 << 40, 4096, 4096),
    Withdrawn(key(5002)),
    ReadDone(key(5002), 1),
    ReadFailed(key(5002), 1),
    Confirmed(key(5002), 1, True),
    Used(key(5002), 1),
    Dropped([key(5002)]),
    Query(key(5002)),
    Absent(key(5002)),
]


def test_valid_messages_of_a_stranger_change_nothing(
    shared_agents: Agents, attacked: tuple[str, zmq.Socket[bytes]]
) -> None:
    role, sock = attacked
    assert_unharmed(shared_agents, seed=5002)
    epochs = [shared_agents.status(side).peer_epoch for side in ("prefill", "decode")]  # type: ignore[union-attr]
    order = random.Random(3)

    for _ in range(200):
        sock.send(encode(order.choice(OUT_OF_TURN)))

    assert_unharmed(shared_agents, seed=5003)
    assert epochs == [shared_agents.status(side).peer_epoch for side in ("prefill", "decode")]  # type: ignore[union-attr]
    assert shared_agents.status(role).entries < 100  # type: ignore[union-attr]


def test_a_huge_message_ends_only_its_own_connection(
    shared_agents: Agents, attacked: tuple[str, zmq.Socket[bytes]]
) -> None:
    _, sock = attacked
    pid = agent_pid(shared_agents.prefill)
    before = psutil.Process(pid).memory_info().rss

    for _ in range(5):
        sock.send(b"\x00" * (64 * MIB))

    assert_unharmed(shared_agents, seed=5004)
    assert psutil.Process(pid).memory_info().rss - before < 32 * MIB


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(23, b"\0") + bytes(32)  # ZMTP 3.0, as a client
NULL_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
FLOODS = (5000, 1000, 1000, 1000, 1000, 1000)


@contextlib.contextmanager
def strangers(agents: Agents, count: int) -> Iterator[None]:
    """So many connections to prefill's listener: a third says nothing, a third stops in the middle of the greeting, a
    third completes it and stays. The true pair moves entries among them."""
    ports = agents.prefill.settings.ports
    with contextlib.ExitStack() as stack:
        for number in range(count):
            stranger = stack.enter_context(socket.socket())
            stranger.settimeout(60)
            stranger.connect((ports.host, ports.side_channel))
            with contextlib.suppress(OSError):  # the agent closes those that are slow to greet
                stranger.send((b"", GREETING[:11], GREETING + NULL_READY)[number % 3])
            if number % 1000 == 999:
                assert_unharmed(agents, seed=6000 + number)
        yield


def anonymous_bytes(pid: int) -> int:
    """Memory of the process itself, without the pool."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_ten_thousand_connections_leave_no_trace(agents: Agents) -> None:
    pid = agent_pid(agents.prefill)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert_unharmed(agents, seed=5005)
    before = open_descriptors(pid)
    memory = []

    try:
        for number, size in enumerate(FLOODS):
            count = min(size, hard - 500)
            with strangers(agents, count):
                wait_until(lambda: open_descriptors(pid) > before + count // 4, "the agent holds those that greeted")  # noqa: B023
                assert_unharmed(agents, seed=5010 + number)
            wait_until(lambda: open_descriptors(pid) <= before + 10, "descriptors of closed connections")
            memory.append(anonymous_bytes(pid))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert_unharmed(agents, seed=5006)
    # libzmq's heap grows by less each time until it has what such a flood takes
    assert memory[-1] - memory[-2] < 3 * MIB, memory
    assert memory[-1] - memory[0] < 32 * MIB, memory
