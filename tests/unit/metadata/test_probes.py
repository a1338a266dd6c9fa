from __future__ import annotations

import resource
import socket
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.metadata import probes
from mooncake_v0.metadata.probes import ANSWERS, REFUSED, probe_all
from tests.servers import free_ports


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def full() -> Iterator[int]:
    """The port of a listener whose line is full: a further connect gets no answer, as from a host that is gone."""
    with socket.socket() as listener:
        listener.bind(("", 0))  # every 127.x.y.z
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        yield port
        for client in waiting:
            client.close()


def test_each_address_gets_what_its_connect_found(listening: int, full: int) -> None:
    (closed,) = free_ports(1)
    wanted = {
        ("127.0.0.1", listening): ANSWERS,
        ("localhost", listening): ANSWERS,
        ("127.0.0.1", closed): REFUSED,
        ("127.0.0.1", full): f"127.0.0.1:{full} does not answer",
        ("no such host", 1): "the host name 'no such host' cannot be resolved",
        ("zero\0byte", 1): "the host name 'zero\\x00byte' cannot be resolved",
        ("x" * 300, 1): f"the host name {'x' * 300!r} cannot be resolved",
    }

    assert probe_all(wanted) == wanted


def test_an_address_that_the_kernel_refuses_is_said_with_its_reason() -> None:
    (found,) = probe_all([("255.255.255.255", 1)]).values()

    assert found.startswith("255.255.255.255:1 cannot be reached: ")


def test_more_addresses_than_may_be_asked_at_once_are_all_asked(
    monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    monkeypatch.setattr(probes, "MAX_CONNECTS", 3)
    monkeypatch.setattr(probes, "FEW_CONNECTS", 3)
    (closed,) = free_ports(1)
    wanted = {(f"127.0.1.{i}", closed): REFUSED for i in range(1, 200)} | {("127.0.0.1", listening): ANSWERS}
    descriptors = len(list(Path("/proc/self/fd").iterdir()))

    assert probe_all(wanted) == wanted
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_thousands_that_do_not_answer_wait_together_whatever_the_limit_of_files(full: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = {(f"127.0.{i >> 7}.{1 + (i & 127)}", full): "does not answer" for i in range(3000)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        found = probe_all(wanted)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found == {(host, port): f"{host}:{port} does not answer" for host, port in wanted}


def test_no_addresses_are_no_work() -> None:
    assert probe_all([]) == {}
