"""Layers leave for the peer while the model still computes those behind them."""

from __future__ import annotations

import torch

from mooncake_v0.kv.connector import GROUP_BYTES, Producer, StepStore, pack_block_ids
from mooncake_v0.kv.layout import KVLayout
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan
from tests.freezing import frozen
from tests.transfer.conftest import Agents, MakeAgents, agent_pid, key, wait_until

LAYERS, BLOCKS = 4, 8
ROW_BYTES = GROUP_BYTES // (2 * BLOCKS)  # keys and values of a layer are one group


def begin(agents: Agents, layers: int = LAYERS) -> tuple[StepStore, list[torch.Tensor]]:
    caches = [torch.full((2, BLOCKS, ROW_BYTES), layer, dtype=torch.uint8) for layer in range(layers)]
    layout = KVLayout(caches, 1)
    producer = Producer(
        agents.prefill, layout, hidden_size=8, hidden_dtype=torch.float32, count=lambda name, value: None
    )
    prompt = PromptPlan(key(1), pack_block_ids(list(range(BLOCKS))), 0, 0, 16 * BLOCKS)
    return producer.reserve(TransferPlan([prompt], 1, True)), caches


def test_layers_are_with_the_peer_before_the_last_one_is_computed(make_agents: MakeAgents) -> None:
    agents = make_agents(pool_nbytes=6 * GROUP_BYTES)
    agents.wait_connected()
    store, caches = begin(agents)

    for number, cache in enumerate(caches[:-1], start=1):
        store.layer_done(cache.data_ptr())
        wait_until(
            lambda wanted=number * GROUP_BYTES: agents.decode.status().counters.get("read_bytes", 0) == wanted,
            f"{number} layers are read while the model computes",
        )
    assert agents.fetch(1, wait_s=0.0) == "late"
    store.finish(torch.zeros(1, 8))

    data = agents.fetch(1)
    assert isinstance(data, bytes)
    assert [data[layer * GROUP_BYTES] for layer in range(LAYERS)] == list(range(LAYERS))
    assert agents.decode.status().counters["reads"] == LAYERS


def test_layers_that_wait_for_a_read_share_the_next_one(make_agents: MakeAgents) -> None:
    layers = 8
    agents = make_agents(pool_nbytes=10 * GROUP_BYTES)
    agents.wait_connected()
    store, caches = begin(agents, layers)
    with frozen(agent_pid(agents.prefill)):  # so that the peer hears of all layers at once
        for cache in caches[:-1]:
            store.layer_done(cache.data_ptr())
        store.finish(torch.zeros(1, 8))

    data = agents.fetch(1)

    assert isinstance(data, bytes)
    assert [data[layer * GROUP_BYTES] for layer in range(layers)] == list(range(layers))
    assert 2 <= agents.decode.status().counters["reads"] <= layers // 2 + 1


def test_failed_step_takes_back_what_has_left(make_agents: MakeAgents) -> None:
    agents = make_agents(pool_nbytes=6 * GROUP_BYTES)
    agents.wait_connected()
    store, caches = begin(agents)
    store.layer_done(caches[0].data_ptr())
    wait_until(lambda: agents.decode.status().counters.get("read_bytes", 0) == GROUP_BYTES, "a layer is read")

    store.abort()

    assert agents.fetch(1, wait_s=20.0) in ("failed", "unknown")
    wait_until(lambda: agents.prefill.status().buffer_bytes == 0, "the space is free again")
    with agents.prefill.in_use.by_nobody():
        pass
