"""What an engine has written and the kernel has not sent is kept short, on the sockets that the engine itself made."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Iterator

import pytest

from mooncake_v0.transfer.send_queue import MAX_CPUS, UNSENT_BYTES, is_worth_it, limit_unsent
from tests.transfer.conftest import MakeAgents, agent_pid, listening_addresses, open_descriptors

_PIDFD_GETFD = 438  # the same on every architecture; not in Python's os before 3.15


def unsent_limit(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """Copies of another process' sockets that listen."""
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, int(name), 0)
            assert number >= 0, os.strerror(ctypes.get_errno())
            try:
                one = socket.socket(fileno=number)
            except OSError:
                os.close(number)
                continue
            with one:
                if one.family == socket.AF_INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield one
    finally:
        os.close(process)


def test_connections_of_the_port_have_the_limit_and_others_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as wanted, socket.create_server(("127.0.0.1", 0)) as other:
        before = open_descriptors(os.getpid())
        assert limit_unsent((wanted.getsockname()[1],)) == 1
        assert open_descriptors(os.getpid()) == before
        assert unsent_limit(other) != UNSENT_BYTES
        for listening, limit in ((wanted, UNSENT_BYTES), (other, unsent_limit(other))):
            with socket.create_connection(listening.getsockname()), listening.accept()[0] as accepted:
                assert unsent_limit(accepted) == limit


def test_a_port_on_which_nothing_listens_is_not_found() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert limit_unsent((bound.getsockname()[1],)) == 0


def limited_ports(pid: int) -> list[int]:
    limits = {one.getsockname()[1]: unsent_limit(one) for one in sockets_of(pid)}
    assert limits.keys() == {port for _, port in listening_addresses(pid)}
    return [port for port, limit in limits.items() if limit == UNSENT_BYTES]


@pytest.fixture
def two_cpus() -> Iterator[None]:
    """What is started meanwhile has no more than two."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(every)[:MAX_CPUS])
    yield
    os.sched_setaffinity(0, every)


def test_an_agents_engine_has_it_on_the_port_that_serves_reads(two_cpus: None, make_agents: MakeAgents) -> None:
    agents = make_agents()
    agents.wait_connected()
    for client in (agents.prefill, agents.decode):
        assert limited_ports(agent_pid(client)) == [client.settings.ports.data]


@pytest.mark.parametrize(
    ("cpus", "protocol", "wanted"), [(1, "tcp", True), (2, "tcp", True), (3, "tcp", False), (2, "rdma", False)]
)
def test_only_where_writer_and_reader_take_turns(
    cpus: int, protocol: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cpus)))
    assert is_worth_it(protocol) == wanted
