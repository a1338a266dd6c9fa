"""Requests that join running ones once their KV is in place: the pin's own scheduler and model inputs, real agents."""

from __future__ import annotations

import time
from typing import Any, Callable

import pytest
import torch

from mooncake_v0.kv.copies import HostCopies
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.messages import Arriving, Polled
from mooncake_v0.vllm_plugin import fill_ahead, parking
from mooncake_v0.vllm_plugin.fill_ahead import can_join
from tests.transfer.conftest import POOL_BYTES, Agents, MakeAgents, wait_until
from tests.transfer.engine_side import BLOCK_SIZE, Side, consumer, prefill, producer, prompt

pytestmark = pytest.mark.pin


class LateCopies(HostCopies):
    """As on a GPU: what is asked for happens some time later, in order; at once when something else must come after it."""

    def __init__(self, side: Side) -> None:
        assert side.transfer.consumer is not None
        super().__init__(side.transfer.consumer.layout)
        side.transfer.consumer.copies = self  # type: ignore[assignment]
        self._asked: list[Callable[[], None]] = []
        self.rows_taken = 0

    def fill(self, block_ids: torch.Tensor, rows: torch.Tensor, start: int = 0) -> None:
        self._asked.append(lambda: super(LateCopies, self).fill(block_ids, rows, start))

    def take(self, row: torch.Tensor, out: torch.Tensor) -> None:
        self.rows_taken += 1
        self._asked.append(lambda: super(LateCopies, self).take(row, out))

    def then(self, action: Callable[[], None]) -> None:
        self._asked.append(action)

    def precede(self) -> None:
        self.wait()

    def wait(self) -> None:
        asked, self._asked = self._asked, []
        for action in asked:
            action()


def in_pool(side: Side, tokens: list[int]) -> Callable[[], bool]:
    """Whether decode's agent has this prompt's entry."""
    transfer, group = side.transfer, side.add(tokens)
    key = transfer._key(group, group.first_seq.data.prompt_token_ids_array)
    side.scheduler.abort_seq_group(group.request_id)
    return lambda: transfer.client is not None and transfer.client.poll([key], 1.0).settled == [True]


def running_and_arrived(agents: Agents, length: int = 100, **options: Any) -> tuple[Side, Any, list[int]]:
    """Decode's side with one running request, and another prompt whose entry is there."""
    first, second = producer(agents), consumer(agents, parked=True, **options)
    running = second.add(prompt(20))
    second.run_until_answered(running)
    tokens = prompt(length)
    prefill(first, tokens)
    wait_until(in_pool(second, tokens))
    second.computed_tokens = 0
    return second, running, tokens


def free_blocks(side: Side) -> int:
    return int(side.scheduler.block_manager.get_num_free_gpu_blocks())


def test_a_request_joins_the_running_ones_without_a_step_of_its_own(shared_agents: Agents) -> None:
    side, running, tokens = running_and_arrived(shared_agents)
    before = running.first_seq.get_output_len()

    group, steps = side.add(tokens), 0
    while not group.first_seq.get_output_len():
        side.step()
        steps += 1

    assert running.first_seq.get_output_len() - before == steps  # it got a token in every step
    assert side.computed_tokens == steps  # of the running request; of the prompt nothing was written
    assert (side.counted["hits"], side.counted["filled_ahead"], side.counted["hit_tokens"]) == (1, 1, 100)
    for _ in range(20):
        side.step()
    side.assert_cache_of(group)
    side.assert_cache_of(running)
    assert shared_agents.decode.status().counters["hits"] >= 1


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE])
def test_prompts_of_every_fill_of_their_last_block_join(shared_agents: Agents, length: int) -> None:
    side, running, tokens = running_and_arrived(shared_agents, length)

    group = side.add(tokens)
    side.run_until_answered(group)
    for _ in range(BLOCK_SIZE + 2):
        side.step()

    assert side.counted["filled_ahead"] == 1
    side.assert_cache_of(group)
    side.assert_cache_of(running)


def test_several_join_at_once(shared_agents: Agents) -> None:
    side, running, tokens = running_and_arrived(shared_agents)
    groups = [side.add(tokens) for _ in range(4)]

    side.run_until_answered(*groups)

    assert side.counted["filled_ahead"] == 4
    assert len({group.first_seq.get_output_len() for group in groups}) == 1
    for group in (*groups, running):
        side.assert_cache_of(group)


def test_where_nothing_runs_a_prompt_has_its_own_step_and_computes_nothing(shared_agents: Agents) -> None:
    side, running, tokens = running_and_arrived(shared_agents)
    side.finish(running)

    group = side.add(tokens)
    side.run_until_answered(group)

    assert (side.computed_tokens, side.counted["hits"]) == (0, 1)
    assert "filled_ahead" not in side.counted


def test_running_requests_go_on_while_the_copies_take_their_time(shared_agents: Agents) -> None:
    side, running, tokens = running_and_arrived(shared_agents)
    copies, before = LateCopies(side), running.first_seq.get_output_len()
    group = side.add(tokens)

    for _ in range(10):
        side.step()

    assert running.first_seq.get_output_len() - before == 10
    assert group.first_seq.get_output_len() == 0 and list(side.scheduler.waiting) == [group]
    assert copies.rows_taken == 1  # not once more in every step
    copies.wait()
    side.step()
    assert group.first_seq.get_output_len() == 1
    side.assert_cache_of(group)


def test_a_long_prompt_gets_its_blocks_some_in_every_step(
    shared_agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_ahead, "TOKEN_BYTES", fill_ahead.STEP_BYTES // (2 * BLOCK_SIZE))
    side, running, tokens = running_and_arrived(shared_agents, length=20 * BLOCK_SIZE + 5)
    group, free = side.add(tokens), []

    while not group.first_seq.get_output_len():
        side.step()
        free.append(free_blocks(side))

    taken = [before - after for before, after in zip(free, free[1:])]
    assert len(free) >= 10 and max(taken) <= 3  # two, and one that what runs may want
    assert side.counted["filled_ahead"] == 1
    side.assert_cache_of(group)
    side.assert_cache_of(running)


def test_blocks_that_another_took_meanwhile_are_waited_for(
    shared_agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_ahead, "TOKEN_BYTES", fill_ahead.STEP_BYTES // (2 * BLOCK_SIZE))
    side, running, tokens = running_and_arrived(shared_agents, length=25 * BLOCK_SIZE, num_blocks=45)
    group = side.add(tokens)
    side.step()
    assert group.first_seq.seq_id in side.scheduler.block_manager.block_tables
    other = side.add(prompt(25 * BLOCK_SIZE), prompt_logprobs=1)  # computed by decode, at once

    for _ in range(20):
        side.step()

    assert list(side.scheduler.waiting) == [group] and other in side.scheduler.running
    assert group.first_seq.seq_id not in side.scheduler.block_manager.block_tables
    side.finish(other)
    side.run_until_answered(group)
    side.assert_cache_of(group)
    side.assert_cache_of(running)


def test_a_request_that_is_aborted_during_its_copies_leaves_nothing_behind(shared_agents: Agents) -> None:
    """Its blocks go to others at once: their content must not be overwritten by what was asked for before."""
    side, running, tokens = running_and_arrived(shared_agents, length=30 * BLOCK_SIZE, num_blocks=45)
    copies, free = LateCopies(side), free_blocks(side)
    group = side.add(tokens)
    side.step()
    assert free_blocks(side) <= free - 30

    side.scheduler.abort_seq_group(group.request_id)
    another = side.add(prompt(30 * BLOCK_SIZE), prompt_logprobs=1)  # computed by decode in any case
    side.run_until_answered(another)
    copies.wait()

    side.assert_cache_of(another)
    side.assert_cache_of(running)
    side.finish(another)
    assert free_blocks(side) >= free - 1  # what runs may have grown
    assert_nothing_is_pinned(shared_agents)


def assert_nothing_is_pinned(agents: Agents) -> None:
    """An entry as large as the buffer takes the place of everything else."""
    assert agents.decode.in_use._users == 0
    number = time.monotonic_ns() % (1 << 40)
    assert agents.store(number, POOL_BYTES, 1) == ""
    wait_until(lambda: agents.fetch(number) == bytes([1]) * POOL_BYTES)


def test_who_runs_gets_blocks_before_who_is_held_back(shared_agents: Agents) -> None:
    side, running, tokens = running_and_arrived(shared_agents, length=28 * BLOCK_SIZE, num_blocks=32)
    copies = LateCopies(side)
    group = side.add(tokens)
    side.step()
    assert free_blocks(side) == 2

    for _ in range(4 * BLOCK_SIZE):
        before = running.first_seq.get_output_len()
        side.step()
        assert running in side.scheduler.running  # never preempted
        assert running.first_seq.get_output_len() == before + 1 or group in side.scheduler.running

    side.assert_cache_of(running)
    side.finish(running)
    side.scheduler.abort_seq_group(group.request_id)
    assert free_blocks(side) == 32
    copies.wait()
    assert_nothing_is_pinned(shared_agents)


def test_a_joined_request_that_is_preempted_before_its_first_step_is_served_again(shared_agents: Agents) -> None:
    side, _, tokens = running_and_arrived(shared_agents)
    group = side.add(tokens)
    side.step()
    side.add(prompt(40), prompt_logprobs=1)  # computed by decode, in a step of its own, which comes first
    side.step()
    assert group in side.scheduler.running and not group.first_seq.get_output_len()

    side.scheduler.running.remove(group)
    side.scheduler._preempt_by_recompute(group)
    side.scheduler.waiting.append(group)
    side.run_until_answered(group)

    assert (side.counted["hits"], side.counted["filled_ahead"]) == (2, 1)
    side.assert_cache_of(group)


def test_a_region_that_prefill_reused_is_not_joined_with(make_agents: MakeAgents) -> None:
    agents = make_agents(transport="auto")
    agents.wait_connected()
    side, running, tokens = running_and_arrived(agents)
    copies = LateCopies(side)
    group = side.add(tokens)
    side.step()
    pool = agents.decode.peer_pool
    assert pool is not None

    for offset in range(0, agents.prefill.pool.nbytes, 4096):
        agents.prefill.pool.set_generation(offset, 7)
    copies.wait()
    side.transfer.consumer.copies = HostCopies(side.transfer.consumer.layout)  # type: ignore[union-attr]
    side.run_until_answered(group)

    assert "filled_ahead" not in side.counted
    assert side.computed_tokens >= len(tokens)
    side.assert_cache_of(group)
    side.assert_cache_of(running)


def test_an_entry_of_another_size_is_left_where_it_is(shared_agents: Agents) -> None:
    side, running, _ = running_and_arrived(shared_agents)
    group = side.add(prompt(100))
    key = side.transfer._key(group, group.first_seq.data.prompt_token_ids_array)
    shared_agents.prefill.reserve([key], [5000])
    shared_agents.prefill.commit([key], [5000])
    wait_until(lambda: shared_agents.decode.poll([key], 1.0).settled == [True])

    side.run_until_answered(group)

    assert side.counted["miss_wrong_size"] == 1 and "filled_ahead" not in side.counted
    side.assert_cache_of(group)
    side.assert_cache_of(running)
    assert_nothing_is_pinned(shared_agents)


def test_no_more_run_than_vllm_was_told(shared_agents: Agents) -> None:
    side, running, tokens = running_and_arrived(shared_agents)
    groups = [side.add(tokens) for _ in range(12)]

    most = 0
    for _ in range(30):
        side.step()
        most = max(most, len(side.scheduler.running))

    assert most == side.scheduler.scheduler_config.max_num_seqs
    for group in side.scheduler.running:
        side.assert_cache_of(group)
    side.finish(running)
    side.step()
    side.step()
    assert len(side.scheduler.running) == most
    assert len(groups) + 1 - most - 1 == len(side.scheduler.waiting)


class SlowEntry:
    """What decode's agent says of its entries: some bytes are here, until `rest_is_here`."""

    def __init__(self, client: AgentClient, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share, self.rest_is_here, self.gone = share, False, False
        self._client, self._poll = client, client.poll
        monkeypatch.setattr(client, "poll", self.poll)
        monkeypatch.setattr(parking, "MIN_PART_BYTES", 0)

    def poll(self, keys: list[bytes], wait_s: float, handoffs: list[bytes]) -> Polled:
        polled = self._poll(keys, wait_s, handoffs)
        if self.rest_is_here:
            return polled
        selected = self._client.select(keys, 0.0)
        self._client.release(keys, {})
        places = zip(selected.offsets, selected.generations, selected.nbytes)
        arriving = [Arriving(offset, number, size, int(size * self.share)) for offset, number, size in places]
        return Polled(polled.call, [False] * len(keys), [False] * len(keys), list(arriving))


def test_what_is_here_is_copied_while_the_rest_arrives(shared_agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    side, running, tokens = running_and_arrived(shared_agents)
    entry = SlowEntry(shared_agents.decode, 0.6, monkeypatch)
    group = side.add(tokens)

    for _ in range(5):
        side.step()
    table = side.scheduler.block_manager.get_block_table(group.first_seq)
    assert side.slots(0, table[0])[0].any() and not side.slots(1, table[0])[1].any()
    entry.rest_is_here = True
    shared_agents.decode.pool.add_news()
    side.run_until_answered(group)

    assert side.counted["filled_ahead"] == 1
    side.assert_cache_of(group)
    side.assert_cache_of(running)


def test_a_request_whose_rest_does_not_come_is_computed(shared_agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    side, running, tokens = running_and_arrived(shared_agents)
    SlowEntry(shared_agents.decode, 0.6, monkeypatch)
    group = side.add(tokens)
    side.step()
    side.step()
    assert side.scheduler.block_manager.get_block_table(group.first_seq)

    parking_lot_of(side)._watched[group.request_id].deadline_s = time.monotonic() - 1.0  # type: ignore[union-attr]
    side.run_until_answered(group)

    assert "filled_ahead" not in side.counted
    side.assert_cache_of(group)
    side.assert_cache_of(running)


def parking_lot_of(side: Side) -> parking.ParkingLot:
    """Its call is what `Scheduler.schedule` is now."""
    (lot,) = [
        cell.cell_contents for cell in side.scheduler.schedule.__closure__ if hasattr(cell.cell_contents, "_watched")
    ]
    return lot  # type: ignore[no-any-return]


@pytest.mark.parametrize("option", [{"prefix_caching": True}, {"window": 64}], ids=str)
def test_where_a_prompts_step_does_more_than_to_fill_blocks_nobody_joins(shared_agents: Agents, option: Any) -> None:
    side, running, tokens = running_and_arrived(shared_agents, **option)

    group = side.add(tokens)
    side.run_until_answered(group)

    assert not can_join(side.transfer.vllm_config, side.runner)
    assert side.counted["hits"] == 1 and "filled_ahead" not in side.counted
    side.assert_cache_of(running)


def test_a_seeded_request_that_joins_has_its_generator(shared_agents: Agents) -> None:
    side, _, tokens = running_and_arrived(shared_agents)

    group = side.add(tokens, seed=5)
    side.run_until_answered(group)

    generator = side.runner.generators[group.request_id]
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=torch.Generator().manual_seed(5)))
