"""Two real agents with the real engine over tcp, and a real metadata gateway, without vLLM."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator

import psutil
import pytest

from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.pin.processes import find_free_range
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.agent_settings import ENGINE, AgentSettings
from mooncake_v0.transfer.messages import Status

MIB = 1 << 20
POOL_BYTES = 64 * MIB
DEADLINE_S = 30.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def wait_until(condition: Callable[[], Any], what: str = "") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


@dataclass
class Agents:
    """The two clients; decode is connected to prefill once `wait_connected` returns."""

    prefill: AgentClient
    decode: AgentClient

    def status(self, role: str) -> Status | None:
        with contextlib.suppress(AgentUnavailableError):
            return (self.prefill if role == "prefill" else self.decode).status()
        return None

    def is_connected(self) -> bool:
        prefill, decode = self.status("prefill"), self.status("decode")
        return bool(prefill and prefill.peer_epoch and decode and decode.peer_epoch and decode.transport)

    def wait_connected(self) -> None:
        wait_until(self.is_connected, f"{self.status('prefill')} {self.status('decode')}")

    def store(self, number: int, nbytes: int, fill: int) -> str:
        """Put an entry of one byte value into prefill's buffer; the reason when it was not taken."""
        reserved = self.prefill.reserve([key(number)], [nbytes])
        if reserved.offsets[0] < 0:
            return reserved.reasons[0]
        start = reserved.offsets[0]
        self.prefill.pool.map[start : start + nbytes] = bytes([fill]) * nbytes
        self.prefill.commit([key(number)], [nbytes])
        return ""

    def fetch(self, number: int, wait_s: float = 5.0) -> bytes | str:
        """The bytes of an entry on decode's side, or the reason why it is not here."""
        selected = self.decode.select([key(number)], wait_s)
        if selected.offsets[0] < 0:
            return selected.reasons[0]
        start, generation = selected.offsets[0], selected.generations[0]
        pool = self.decode.peer_pool if selected.pools[0] else self.decode.pool
        assert pool is not None and selected.pools[0] in (0, self.decode.peer_pool_number)
        data = pool.map[start : start + selected.nbytes[0]]
        assert not selected.pools[0] or pool.generation_at(start) == generation
        self.decode.release([key(number)], {})
        return data


def agent_pid(client: AgentClient) -> int:
    assert client._process is not None
    return client._process.pid


@pytest.fixture(scope="session")
def metadata_url() -> Iterator[str]:
    gateway = start_gateway_thread("memory:", is_private=False)
    yield gateway.url
    gateway.close()


MakeAgents = Callable[..., Agents]


@pytest.fixture
def make_agents(metadata_url: str) -> Iterator[MakeAgents]:
    """make_agents(decode={…}, prefill={…}): two started agents whose settings may differ; ended afterwards.

    Entries move through the engine unless transport="auto" is given. device_pools: of prefill and of decode.
    """
    started: list[AgentClient] = []

    def make(*, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any) -> Agents:
        base = find_free_range(150)
        url = both.pop("metadata_url", metadata_url)
        pools = both.pop("device_pools", (None, None))
        config = MooncakeConfig(Endpoint("127.0.0.1", base), Endpoint("127.0.0.1", base + 100), url, "tcp")
        common: dict[str, Any] = {"config": config, "fingerprint": {"model": "m"}, "pool_nbytes": POOL_BYTES}
        common.update({"transport": ENGINE, **both})
        clients = []
        for role, changes, device_pools in (("prefill", prefill, pools[0]), ("decode", decode, pools[1])):
            settings = AgentSettings(role=role, rank=0, tp_size=1, **common)  # type: ignore[arg-type]
            clients.append(AgentClient(replace(settings, **(changes or {})), device_pools=device_pools))
            started.append(clients[-1])
            clients[-1].start()
        return Agents(*clients)

    yield make
    pids = [agent_pid(client) for client in started]
    for client in started:
        client.close()
        client.pool.close()  # a worker's own ends with its process; here 70 of them would be 9 GB
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), f"agents end with their workers: {pids}")


@pytest.fixture
def agents(make_agents: MakeAgents) -> Agents:
    made = make_agents()
    made.wait_connected()
    return made


@pytest.fixture(scope="module")
def shared_agents(metadata_url: str) -> Iterator[Agents]:
    """A connected pair for a module's tests. They may leave entries in its buffer, and some do for good."""
    base = find_free_range(150)
    config = MooncakeConfig(Endpoint("127.0.0.1", base), Endpoint("127.0.0.1", base + 100), metadata_url, "tcp")
    clients = [
        AgentClient(AgentSettings(role, 0, 1, config, {"model": "m"}, POOL_BYTES, transport=ENGINE))
        for role in ("prefill", "decode")
    ]
    for client in clients:
        client.start()
    pair = Agents(*clients)
    pair.wait_connected()
    yield pair
    for client in clients:
        client.close()


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    connections = psutil.Process(pid).net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
