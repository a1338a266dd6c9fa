"""Two hosts whose side channel is open while prefill's data port is blocked meanwhile: network namespaces and a firewall."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import Iterator

import pytest

from mooncake_v0.config.model import Endpoint, MooncakeConfig, Role
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.agent_settings import AgentSettings
from tests.transfer.conftest import MIB, Agents, wait_until
from tests.two_hosts import blocked, inside, two_hosts

PREFILL, DECODE = "10.213.9.1", "10.213.9.2"
POOL_BYTES = 300 * MIB
CLONE_NEWNET = 0x40000000  # linux/sched.h
GATEWAY = f"""
import sys
from mooncake_v0.metadata.gateway import start_gateway_thread
gateway = start_gateway_thread("memory:", host="{PREFILL}", is_private=False)
print(gateway.url, flush=True)
sys.stdin.read()
"""


@contextmanager
def this_thread_inside(namespace: str) -> Iterator[None]:
    """And the threads and processes that it starts meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{namespace}") as other:
        assert libc.setns(other.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(own.fileno(), CLONE_NEWNET) == 0


@contextmanager
def metadata_server(namespace: str) -> Iterator[str]:
    command = [*inside(namespace), sys.executable, "-c", GATEWAY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@pytest.fixture
def names() -> Iterator[dict[str, str]]:
    with two_hosts({"prefill": PREFILL, "decode": DECODE}) as names:
        yield names


@pytest.fixture
def agents(names: dict[str, str]) -> Iterator[Agents]:
    with metadata_server(names["prefill"]) as url:
        config = MooncakeConfig(Endpoint(PREFILL, 13000), Endpoint(DECODE, 13100), url, "tcp")
        clients = []
        roles: tuple[Role, Role] = ("prefill", "decode")
        for role in roles:
            with this_thread_inside(names[role]):
                clients.append(AgentClient(AgentSettings(role, 0, 1, config, {"model": "m"}, POOL_BYTES)))
                clients[-1].start()
        yield Agents(*clients)
        for client in clients:
            client.close()
            client.pool.close()


def test_a_blocked_port_costs_a_miss_and_no_agent(names: dict[str, str], agents: Agents) -> None:
    agents.wait_connected()
    assert agents.store(1, 20 * MIB, fill=1) == ""
    assert agents.fetch(1) == bytes([1]) * 20 * MIB

    with blocked(names["prefill"], agents.prefill.settings.ports.data):
        agents.store(2, 200 * MIB, fill=2)
        assert agents.fetch(2, wait_s=1.0) == "late"
        wait_until(lambda: agents.decode.status().counters.get("read_failed"), "the read is given up")
        wait_until(lambda: agents.decode.status().buffer_bytes == 20 * MIB, "its space is free again")
    assert agents.store(3, 20 * MIB, fill=3) == ""
    assert agents.fetch(3) == bytes([3]) * 20 * MIB

    status = agents.decode.status()
    assert (agents.decode.restarts, status.counters["quarantined_bytes"]) == (0, 0)
    assert status.counters["read_failed"] <= 2  # a second part may have begun when the first failed
