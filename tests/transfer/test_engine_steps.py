"""Features that the CPU worker of the pin refuses, on the pin's scheduler and model input builder: see `engine_side`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.transfer.conftest import Agents
from tests.transfer.engine_side import BLOCK_SIZE, SHAPES, Side, consumer, prefill, producer, prompt

pytestmark = pytest.mark.pin

MARK = 125  # a value that no token has


def mark_block(side: Side, group: Any, index: int) -> torch.Tensor:
    """Overwrite one block of a request's table: whoever writes it afterwards is seen."""
    block = side.scheduler.block_manager.get_block_table(group.first_seq)[index]
    slots = side.slots(0, block)
    slots[:] = MARK
    return slots


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("backend", SHAPES)
def test_a_prompt_of_every_backend_and_cache_type_is_not_computed_by_decode(
    shared_agents: Agents, backend: str, dtype: torch.dtype
) -> None:
    first, second = producer(shared_agents, SHAPES[backend], dtype), consumer(shared_agents, SHAPES[backend], dtype)
    tokens = prompt(100)
    prefill(first, tokens)

    group = second.add(tokens)
    second.run_until_answered(group)

    assert (second.computed_tokens, second.counted["hits"]) == (0, 1)
    second.assert_cache_of(group)


def test_a_prompt_in_chunks_is_stored_with_its_last_one(shared_agents: Agents) -> None:
    """Beside another that is being answered, so that a chunk shares its batch with decode steps."""
    first, second = producer(shared_agents, chunk=40), consumer(shared_agents)
    short, long = prompt(20), prompt(150)
    running = first.add(short)
    first.run_until_answered(running)
    group = first.add(long)
    first.step()

    assert first.counted["stored_prompts"] == 1
    first.run_until_answered(group)
    assert first.counted["stored_prompts"] == 2
    assert running.first_seq.get_output_len() > 2

    groups = [second.add(short), second.add(long)]
    second.run_until_answered(*groups)
    assert (second.computed_tokens, second.counted["hits"]) == (0, 2)
    for one in groups:
        second.assert_cache_of(one)


def test_blocks_from_the_producers_prefix_cache_are_stored_with_the_others(shared_agents: Agents) -> None:
    first, second = producer(shared_agents, prefix_caching=True), consumer(shared_agents)
    shared = prompt(64)
    prefill(first, shared + prompt(10))
    first.computed_tokens = 0
    tokens = shared + prompt(30)
    prefill(first, tokens)

    assert first.computed_tokens == 30
    group = second.add(tokens)
    second.run_until_answered(group)
    assert (second.computed_tokens, second.counted["hits"]) == (0, 1)
    second.assert_cache_of(group)


def test_chunks_and_prefix_cache_together_on_the_producer(shared_agents: Agents) -> None:
    first, second = producer(shared_agents, prefix_caching=True, chunk=48), consumer(shared_agents)
    shared = prompt(96)
    prefill(first, shared + prompt(5))
    tokens = shared + prompt(100)
    prefill(first, tokens)

    group = second.add(tokens)
    second.run_until_answered(group)
    assert (second.computed_tokens, second.counted["hits"]) == (0, 1)
    second.assert_cache_of(group)


def test_a_consumer_with_a_prefix_cache_writes_only_the_blocks_that_it_lacks(shared_agents: Agents) -> None:
    first, second = producer(shared_agents), consumer(shared_agents, prefix_caching=True)
    shared = prompt(64)
    one, other = shared + prompt(10), shared + prompt(40)
    prefill(first, one, other)
    earlier = second.add(one)
    second.run_until_answered(earlier)
    held = mark_block(second, earlier, 2)

    group = second.add(other)
    second.run_until_answered(group)

    assert (second.computed_tokens, second.counted["hits"]) == (0, 2)
    assert (
        second.scheduler.block_manager.get_block_table(group.first_seq)[2]
        == (second.scheduler.block_manager.get_block_table(earlier.first_seq)[2])
    )
    assert (held == MARK).all(), "a block that another request reads was written"
    second.assert_cache_of(group, first=64)


def test_a_prompt_that_the_consumers_prefix_cache_holds_writes_its_last_block_as_vllm_does(
    shared_agents: Agents,
) -> None:
    """The pin never counts a prompt's last block as computed: there is always something to sample from."""
    first, second = producer(shared_agents), consumer(shared_agents, prefix_caching=True)
    tokens = prompt(5 * BLOCK_SIZE)
    prefill(first, tokens)
    earlier = second.add(tokens)
    second.run_until_answered(earlier)
    held, last = mark_block(second, earlier, 3), mark_block(second, earlier, 4)

    group = second.add(tokens)
    second.run_until_answered(group)

    assert (second.computed_tokens, second.counted["hits"]) == (0, 2)
    assert (held == MARK).all() and not (last == MARK).any()
    assert group.first_seq.get_token_ids() == earlier.first_seq.get_token_ids()[: len(tokens) + 1]


def test_a_prefix_that_decode_holds_does_not_make_an_unknown_prompt_a_hit(shared_agents: Agents) -> None:
    second = consumer(shared_agents, prefix_caching=True)
    shared = prompt(64)
    for tokens in (shared + prompt(9), shared + prompt(20)):
        group = second.add(tokens)
        second.run_until_answered(group)
        second.assert_cache_of(group)

    assert second.computed_tokens == 64 + 9 + 20
    assert "hits" not in second.counted


def test_a_sliding_window_drops_blocks_of_long_prompts_in_chunks(shared_agents: Agents) -> None:
    """The scheduler gives dropped blocks the number of one null block; nobody reads them again."""
    window = 64
    first = producer(shared_agents, chunk=32, window=window)
    second = consumer(shared_agents, window=window)
    tokens = prompt(300)
    prefill(first, tokens)

    group = second.add(tokens)
    second.run_until_answered(group)

    assert (second.computed_tokens, second.counted["hits"]) == (0, 1)
    second.assert_cache_of(group, first=len(tokens) - window)


def make_lora(folder: Path, number: int) -> Any:
    from vllm.lora.request import LoRARequest

    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes([number]) * 64)
    return LoRARequest(f"lora {number}", number, str(folder))


def make_prompt_adapter(folder: Path, number: int) -> Any:
    from vllm.prompt_adapter.request import PromptAdapterRequest

    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(bytes([number]) * 64)
    return PromptAdapterRequest(f"prompt adapter {number}", number, str(folder), 8)


@pytest.mark.parametrize(("kind", "make"), [("lora", make_lora), ("prompt_adapter", make_prompt_adapter)])
def test_one_prompt_under_two_adapters_and_none_is_three_entries(
    shared_agents: Agents, tmp_path: Path, kind: str, make: Any
) -> None:
    adapters = [make(tmp_path / "a", 1), make(tmp_path / "b", 2), None]
    first, second = producer(shared_agents), consumer(shared_agents)
    tokens = prompt(70)
    for adapter in adapters:
        prefill(first, tokens, **{kind: adapter})

    assert first.counted["stored_prompts"] == 3
    for adapter in adapters:
        group = second.add(tokens, **{kind: adapter})
        second.run_until_answered(group)
        second.assert_cache_of(group)
    assert (second.computed_tokens, second.counted["hits"]) == (0, 3)


@pytest.mark.parametrize(("kind", "make"), [("lora", make_lora), ("prompt_adapter", make_prompt_adapter)])
def test_the_kv_of_one_adapter_is_not_taken_for_another(
    shared_agents: Agents, tmp_path: Path, kind: str, make: Any
) -> None:
    first, second = producer(shared_agents), consumer(shared_agents)
    tokens = prompt(70)
    prefill(first, tokens, **{kind: make(tmp_path / "a", 1)})
    prefill(first, tokens)

    group = second.add(tokens, **{kind: make(tmp_path / "b", 2)})
    second.run_until_answered(group)

    assert second.computed_tokens == 70 and "hits" not in second.counted
    second.assert_cache_of(group)


def test_requests_that_are_swapped_out_and_in_keep_their_kv(shared_agents: Agents) -> None:
    """14 blocks for three prompts of three blocks each, which grow to six."""
    first = producer(shared_agents)
    second = consumer(shared_agents, num_blocks=14, swap_blocks=40)
    prompts = [prompt(40) for _ in range(3)]
    prefill(first, *prompts)

    groups = [second.add(tokens) for tokens in prompts]
    second.run_until_answered(*groups)
    while any(group.first_seq.get_output_len() < 50 for group in groups):
        second.step()
        for group in list(second.scheduler.running):
            second.assert_cache_of(group)
            if group.first_seq.get_output_len() >= 50:
                second.finish(group)

    assert second.swapped_out > 0
    assert second.counted["hits"] == 3
    assert second.computed_tokens == 3 * 49  # one a step, after the first; no prompt


def test_a_producer_that_swaps_stores_right_kv(shared_agents: Agents) -> None:
    first = producer(shared_agents, num_blocks=14, swap_blocks=40)
    second = consumer(shared_agents)
    prompts = [prompt(40) for _ in range(4)]
    groups = [first.add(tokens) for tokens in prompts]
    while any(group.first_seq.get_output_len() < 50 for group in groups):
        first.step()
        for group in list(first.scheduler.running):
            if group.first_seq.get_output_len() >= 50:
                first.finish(group)

    assert first.swapped_out > 0 and first.counted["stored_prompts"] == 4
    again = [second.add(tokens) for tokens in prompts]
    second.run_until_answered(*again)
    assert (second.computed_tokens, second.counted["hits"]) == (0, 4)
    for group in again:
        second.assert_cache_of(group)


def test_a_request_that_is_computed_again_is_neither_looked_up_nor_stored_again(shared_agents: Agents) -> None:
    """Preemption by recomputing: the second prefill has answer tokens in it."""
    first, second = producer(shared_agents), consumer(shared_agents, num_blocks=14)
    prompts = [prompt(40) for _ in range(3)]
    prefill(first, *prompts)

    groups = [second.add(tokens) for tokens in prompts]
    second.run_until_answered(*groups)
    while any(group.first_seq.get_output_len() < 50 for group in groups):
        second.step()
        for group in list(second.scheduler.running):
            second.assert_cache_of(group)
            if group.first_seq.get_output_len() >= 50:
                second.finish(group)

    assert second.scheduler.num_cumulative_preemption > 0
    assert second.counted["hits"] == 3
    assert second.computed_tokens > 3 * 49


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("multimodal data", {"multi_modal_data": {"image": "pixels"}}),
        ("log probabilities of the prompt", {"prompt_logprobs": 1}),
        ("a request that is preempted and has an answer already", {"answer": [7, 8]}),
        ("an embedding request", {"sampling": False}),
    ],
)
def test_what_kv_and_one_hidden_row_cannot_serve_is_computed_by_decode(
    shared_agents: Agents, what: str, fields: dict[str, Any]
) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.sequence import SequenceData, SequenceGroupMetadata

    side = consumer(shared_agents)
    data = SequenceData.from_seqs(prompt(20), fields.get("answer"))
    sampling = SamplingParams(prompt_logprobs=fields.get("prompt_logprobs")) if fields.get("sampling", True) else None
    group = SequenceGroupMetadata(
        "any", True, {0: data}, sampling, {0: [1, 2]}, multi_modal_data=fields.get("multi_modal_data")
    )
    model_input = SimpleNamespace(query_lens=[20])

    assert side.transfer._make_plan([group], model_input) is None, what
    plain = SequenceGroupMetadata("any", True, {0: SequenceData.from_seqs(prompt(20))}, SamplingParams(), {0: [1, 2]})
    mixed = side.transfer._make_plan([plain, group], SimpleNamespace(query_lens=[20, 20]))
    assert mixed is not None and not mixed.complete, "the whole batch is computed"
