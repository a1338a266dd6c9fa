"""Two agents on one host: decode maps prefill's pool and uses entries where they lie, or falls back to the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mooncake_v0.errors import TransferError
from mooncake_v0.kv.connector import MISSING, Consumer, pack_block_ids
from mooncake_v0.kv.layout import KVLayout
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan
from mooncake_v0.transfer.agent_settings import AUTO, ENGINE, SHM
from mooncake_v0.transfer.pool import Pool
from mooncake_v0.transfer.same_host import PoolOffer, fetch_pool
from tests.transfer.conftest import MIB, POOL_BYTES, Agents, MakeAgents, key, wait_until


@pytest.fixture
def mapped(make_agents: MakeAgents) -> Agents:
    agents = make_agents(transport=AUTO)
    agents.wait_connected()
    assert agents.decode.status().transport == SHM
    return agents


@pytest.mark.parametrize("nbytes", [1, 4097, 33 * MIB + 17])
def test_entry_is_used_where_it_lies(mapped: Agents, nbytes: int) -> None:
    assert mapped.store(1, nbytes, fill=7) == ""

    assert mapped.fetch(1) == bytes([7]) * nbytes
    assert mapped.fetch(1) == bytes([7]) * nbytes

    status = mapped.decode.status()
    assert (status.counters["mapped"], status.counters.get("reads", 0), status.buffer_bytes) == (1, 0, 0)
    wait_until(lambda: mapped.prefill.status().counters.get("delivered", 0) == 1, "prefill hears of the use")


def test_announced_entry_is_waited_for_and_only_up_to_the_deadline(mapped: Agents) -> None:
    mapped.prefill.reserve([key(1)], [4096])
    assert mapped.fetch(1, wait_s=0.3) == "late"

    mapped.prefill.commit([key(1)], [4096])

    assert isinstance(mapped.fetch(1), bytes)


def test_aborted_entry_ends_the_wait(mapped: Agents) -> None:
    mapped.prefill.reserve([key(1)], [4096])
    mapped.prefill.abort([key(1)])

    assert mapped.fetch(1, wait_s=20.0) in ("failed", "unknown")


def test_entry_that_prefill_still_has_is_not_computed_into_the_pool_again(mapped: Agents) -> None:
    mapped.store(1, MIB, fill=1)
    mapped.fetch(1)

    assert mapped.store(1, MIB, fill=2) == "exists"
    assert mapped.fetch(1) == bytes([1]) * MIB


def test_evicted_entry_is_a_miss(mapped: Agents) -> None:
    for number in range(1, 13):
        assert mapped.store(number, 10 * MIB, fill=number) == ""
        assert mapped.fetch(number) == bytes([number]) * 10 * MIB

    wait_until(lambda: mapped.decode.status().entries <= POOL_BYTES // (10 * MIB), "decode hears of the evictions")
    assert mapped.fetch(1) in ("unknown", "failed")
    assert mapped.fetch(12) == bytes([12]) * 10 * MIB


def test_entries_that_decode_never_asks_for_do_not_keep_their_space(mapped: Agents) -> None:
    """As after clients that left: through the engine each offered entry is kept for half a minute."""
    mapped.store(1, MIB, fill=1)
    assert isinstance(mapped.fetch(1), bytes)
    wait_until(lambda: mapped.prefill.status().counters.get("delivered", 0) == 1, "prefill hears that decode maps")

    assert [mapped.store(number, 20 * MIB, fill=1) for number in range(2, 12)] == [""] * 10


def test_reuse_of_a_region_shows_in_its_cell(mapped: Agents) -> None:
    mapped.store(1, 40 * MIB, fill=1)
    selected = mapped.decode.select([key(1)], 5.0)
    pool = mapped.decode.peer_pool
    assert pool is not None and pool.generation_at(selected.offsets[0]) == selected.generations[0]
    mapped.decode.release([key(1)], {})  # nothing holds the entry now

    wait_until(lambda: mapped.store(2, 40 * MIB, fill=2) == "", "the second entry takes the first one's place")

    assert pool.generation_at(selected.offsets[0]) != selected.generations[0]


def make_consumer(agents: Agents, layout: KVLayout, counted: dict[str, float]) -> Consumer:
    def count(name: str, value: float) -> None:
        counted[name] = counted.get(name, 0) + value

    return Consumer(
        agents.decode,
        layout,
        hidden_size=8,
        hidden_dtype=torch.float32,
        count=count,
        wait_s=5.0,
        agree=lambda value: value,
    )


def test_entry_that_is_reused_during_the_copy_is_computed_again(
    mapped: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KVLayout([torch.zeros(2, 64, 1 << 19, dtype=torch.uint8)], 1)
    counted: dict[str, float] = {}
    consumer = make_consumer(mapped, layout, counted)
    plan = TransferPlan([PromptPlan(key(1), pack_block_ids(list(range(40))), 0, 0, 640)], 1, True)
    mapped.store(1, consumer.nbytes(plan.prompts[0]), fill=3)
    hidden = consumer.receive(plan)
    assert hidden is not None and counted["hits"] == 1
    assert set(layout.planes[0][:40].view(torch.uint8).unique().tolist()) == {3}
    scatter = layout.scatter

    def slow_scatter(rows: torch.Tensor, block_ids: torch.Tensor, start: int) -> None:
        """Prefill gives the region to another entry while decode copies it."""
        scatter(rows, block_ids, start)
        wait_until(lambda: mapped.store(2, 40 * MIB, fill=9) in ("", "exists"))

    monkeypatch.setattr(layout, "scatter", slow_scatter)

    assert consumer.receive(plan) is None
    assert (counted["hits"], counted["miss_reused"]) == (1, 1)


def test_pool_that_is_not_mapped_any_more_is_a_miss(mapped: Agents) -> None:
    layout = KVLayout([torch.zeros(2, 64, 1 << 10, dtype=torch.uint8)], 1)
    consumer = make_consumer(mapped, layout, {})
    plan = TransferPlan([PromptPlan(key(1), pack_block_ids([1]), 0, 0, 16)], 1, True)
    mapped.store(1, consumer.nbytes(plan.prompts[0]), fill=3)
    selected = mapped.decode.select([key(1)], 5.0)

    mapped.decode._drop_peer_pool()

    assert consumer._where(plan, selected) == MISSING


def test_pool_of_a_peer_that_is_gone_is_given_back(mapped: Agents) -> None:
    mapped.store(1, MIB, fill=1)
    assert mapped.fetch(1) == bytes([1]) * MIB

    mapped.prefill.close()

    wait_until(lambda: mapped.decode.peer_pool is None, "the mapping ends some seconds after its peer")
    assert mapped.fetch(1) == "no_peer"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_that_wants_the_engine_is_enough(make_agents: MakeAgents, side: str) -> None:
    agents = make_agents(transport=AUTO, **{side: {"transport": ENGINE}})
    agents.wait_connected()
    agents.store(1, MIB, fill=1)

    assert agents.fetch(1) == bytes([1]) * MIB
    assert agents.decode.status().transport == ENGINE
    assert agents.decode.status().counters["reads"] == 1


@pytest.fixture
def offer() -> PoolOffer:
    return PoolOffer(Pool.create(MIB))


FETCH = "import sys; from mooncake_v0.transfer.same_host import fetch_pool; fetch_pool(sys.argv[1], b'')"


def fetch_as(command: list[str], offer: PoolOffer, **how: int) -> str:
    """What a process of its own says that asks for the pool."""
    asking = subprocess.Popen([*command, sys.executable, "-c", FETCH, offer.name], stderr=subprocess.PIPE, **how)  # type: ignore[call-overload]
    while asking.poll() is None:
        offer.serve()
    return str(asking.communicate()[1].decode())


def test_a_process_of_this_user_needs_the_right_nonce(offer: PoolOffer) -> None:
    assert "it has another nonce" in fetch_as([], offer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_given_the_pool(offer: PoolOffer) -> None:
    assert "another user" in fetch_as(["setpriv", "--reuid=65534", "--clear-groups"], offer)


@pytest.mark.skipif(
    subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0,
    reason="network namespaces are not permitted here",
)
def test_a_process_in_another_network_namespace_finds_nobody(offer: PoolOffer) -> None:
    assert "not to be had on this host" in fetch_as(["unshare", "-n"], offer)


def test_a_file_that_could_shrink_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool.create(MIB)
    offer = PoolOffer(pool)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, os.fstat(pool.fd).st_size)
    monkeypatch.setattr(pool, "fd", unsealed)

    with pytest.raises(TransferError, match="could be made smaller"):
        fetched_from(offer)


def test_a_file_of_another_size_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool.create(MIB)
    offer = PoolOffer(pool)
    monkeypatch.setattr(pool, "nbytes", 2 * MIB)

    with pytest.raises(TransferError, match="2097152 bytes are announced"):
        fetched_from(offer)


def fetched_from(offer: PoolOffer) -> None:
    import threading

    serving = threading.Event()

    def serve() -> None:
        while not serving.is_set():
            offer.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        fetch_pool(offer.name, offer.nonce).close()
    finally:
        serving.set()
        thread.join()
