"""Prefill's pool in device memory: decode uses entries where they lie; where it cannot, nothing is ever read instead."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Iterator

import pytest
import torch

from mooncake_v0.errors import TransferError
from mooncake_v0.kv.connector import Consumer, Producer, pack_block_ids
from mooncake_v0.kv.layout import KVLayout
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan
from mooncake_v0.transfer.agent_settings import CUDA_IPC, ENGINE
from tests.transfer.conftest import MIB, Agents, MakeAgents, key, wait_until
from tests.transfer.file_memory import FileMemory, file_pools

BLOCKS = 40


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path short enough for a handle."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def open_ones() -> list[FileMemory]:
    return []


@pytest.fixture
def on_device(make_agents: MakeAgents, folder: Path, open_ones: list[FileMemory]) -> Agents:
    pools = (file_pools(folder, []), file_pools(folder, open_ones))
    agents = make_agents(prefill={"transport": CUDA_IPC}, transport="auto", device_pools=pools)
    agents.wait_connected()
    assert agents.decode.status().transport == CUDA_IPC
    return agents


class Sides:
    """A producer and a consumer with a cache each, and what they counted."""

    def __init__(self, agents: Agents) -> None:
        self.counted: dict[str, float] = {}
        self.caches = [torch.randint(0, 255, (4, 2, 64, 1 << 14), dtype=torch.uint8) for _ in range(2)]
        layouts = [KVLayout(list(cache), 1) for cache in self.caches]
        common = {"hidden_size": 8, "hidden_dtype": torch.float32, "count": self._count}
        self.producer = Producer(agents.prefill, layouts[0], **common)  # type: ignore[arg-type]
        self.consumer = Consumer(agents.decode, layouts[1], wait_s=5.0, agree=lambda value: value, **common)  # type: ignore[arg-type]

    def _count(self, name: str, value: float) -> None:
        self.counted[name] = self.counted.get(name, 0) + value

    def store(self, number: int) -> torch.Tensor:
        hidden = torch.rand(1, 8)
        self.producer.reserve(plan(number)).finish(hidden)
        return hidden


def plan(number: int) -> TransferPlan:
    return TransferPlan([PromptPlan(key(number), pack_block_ids(list(range(BLOCKS))), 0, 0, 16 * BLOCKS)], 1, True)


def test_entry_arrives_in_the_other_cache_and_never_in_host_memory(on_device: Agents) -> None:
    sides = Sides(on_device)

    hidden = sides.store(1)
    received = sides.consumer.receive(plan(1))

    assert received is not None and torch.equal(received, hidden)
    assert torch.equal(sides.caches[0][:, :, :BLOCKS], sides.caches[1][:, :, :BLOCKS])
    assert not torch.equal(sides.caches[0], sides.caches[1])
    assert on_device.prefill.pool.host_nbytes == 4096
    status = on_device.decode.status()
    assert (status.buffer_bytes, status.counters.get("reads", 0)) == (0, 0)


def test_region_that_is_reused_is_a_miss(on_device: Agents) -> None:
    sides = Sides(on_device)
    sides.store(1)
    assert sides.consumer.receive(plan(1)) is not None
    selected = on_device.decode.select([key(1)], 5.0)
    on_device.decode.release([key(1)], {})

    wait_until(lambda: bool(on_device.prefill.reserve([key(2)], [60 * MIB]).offsets[0] >= 0), "another takes its place")

    assert not sides.consumer._is_unchanged(selected)


def test_memory_is_closed_when_its_peer_has_gone(on_device: Agents, open_ones: list[FileMemory]) -> None:
    assert len(open_ones) == 1

    on_device.prefill.close()

    wait_until(lambda: not open_ones, "the memory is closed some seconds after its peer has gone")
    assert on_device.fetch(1) == "no_peer"


@pytest.mark.parametrize("decode", [{"transport": ENGINE}, {}], ids=["maps nothing", "has no such device"])
def test_decode_that_cannot_have_the_memory_computes_and_reads_nothing(
    make_agents: MakeAgents, folder: Path, decode: dict[str, str]
) -> None:
    agents = make_agents(
        prefill={"transport": CUDA_IPC},
        decode=decode,
        transport="auto",
        device_pools=(file_pools(folder, []), None),
    )
    agents.wait_connected()
    wait_until(lambda: agents.decode.status().transport == "none", "decode finds that it cannot")
    sides = Sides(agents)

    sides.store(1)

    assert sides.consumer.receive(plan(1)) is None
    assert [name for name in sides.counted if name.startswith("miss_")] == ["miss_not_mapped"]
    status = agents.decode.status()
    assert (status.buffer_bytes, status.counters.get("reads", 0), status.counters.get("read_failed", 0)) == (0, 0, 0)


def test_prefill_without_a_device_says_what_to_do(make_agents: MakeAgents) -> None:
    with pytest.raises(TransferError, match="no GPU") as caught:
        make_agents(prefill={"transport": CUDA_IPC})

    assert "unset it" in caught.value.fix
