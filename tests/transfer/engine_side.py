"""One side's engine step with the pin's own scheduler and its builder of GPU model inputs, on a CPU, without a model.

What a CPU worker of the pin refuses (chunked prefill, prefix caching, swapping, adapters) is decided in those two. In
place of a model, `Side._compute` writes into each slot a value that depends on the adapter and on every token up to that
one: a block at a wrong place, from another prompt or from another adapter shows. Everything of ours is real: the plan,
the hook around the forward, gather and scatter on the backend's cache shape, and the agents.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from array import array
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Sequence

import torch

from mooncake_v0.kv.connector import Consumer, Producer
from mooncake_v0.kv.layout import KVLayout, find_block_dim
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.vllm_plugin.kv_transfer_config import KVTransferConfig
from mooncake_v0.vllm_plugin.worker_hooks import WorkerTransfer
from tests.transfer.conftest import Agents

BLOCK_SIZE, HEADS, HEAD_SIZE, LAYERS, HIDDEN = 16, 2, 8, 2, 4
MAX_TOKENS = 512
Shape = Callable[[int], Sequence[int]]


SHAPES: dict[str, Shape] = {
    "FlashAttention": lambda blocks: (2, blocks, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "xformers, SDPA, ROCm": lambda blocks: (2, blocks, BLOCK_SIZE * HEADS * HEAD_SIZE),
    "FlashInfer": lambda blocks: (blocks, 2, BLOCK_SIZE, HEADS, HEAD_SIZE),
}
FLASH = SHAPES["FlashAttention"]


def value_of(adapter: str, tokens: Sequence[int], layer: int) -> int:
    """1 to 120: exact in every cache type."""
    digest = hashlib.blake2b(f"{adapter} {layer}".encode() + array("q", tokens).tobytes(), digest_size=2).digest()
    return 1 + int.from_bytes(digest, "little") % 120


class Side:
    """A producer or a consumer. options: chunk (tokens a step), prefix_caching, num_blocks, swap_blocks, window.

    parked: requests are held back until their KV is here, and join those that run (`vllm_plugin.parking`, `fill_ahead`)
    """

    def __init__(
        self,
        client: AgentClient,
        shape: Shape,
        dtype: torch.dtype,
        *,
        chunk: int | None = None,
        prefix_caching: bool = False,
        num_blocks: int = 100,
        swap_blocks: int = 0,
        window: int | None = None,
        parked: bool = False,
    ) -> None:
        from vllm.config import CacheConfig, SchedulerConfig
        from vllm.core.scheduler import Scheduler

        is_producer = client.settings.role == "prefill"
        cache = CacheConfig(BLOCK_SIZE, 0.9, 0, "auto", sliding_window=window, enable_prefix_caching=prefix_caching)
        cache.num_gpu_blocks, cache.num_cpu_blocks = num_blocks, swap_blocks
        scheduling = SchedulerConfig(
            "generate",
            chunk,
            chunk or 8,
            MAX_TOKENS,
            enable_chunked_prefill=chunk is not None,
            preemption_mode="swap" if swap_blocks else None,
        )
        self.scheduler = Scheduler(scheduling, cache, None)
        self.block_dim = find_block_dim(shape)
        self.caches = [torch.zeros(tuple(shape(num_blocks)), dtype=dtype) for _ in range(LAYERS)]
        self.swap_space = [torch.zeros(tuple(shape(max(1, swap_blocks))), dtype=dtype) for _ in range(LAYERS)]
        self.runner = _runner(scheduling, window)
        self.counted: dict[str, float] = {}
        self.computed_tokens = 0
        self.swapped_out = 0
        self._numbers = itertools.count()
        self.transfer = self._make_transfer(client, cache, is_producer, scheduling)
        if parked:
            self.transfer.attach_scheduler(self.scheduler)

    def _make_transfer(self, client: AgentClient, cache: Any, is_producer: bool, scheduling: Any) -> WorkerTransfer:
        config = KVTransferConfig(kv_role="kv_producer" if is_producer else "kv_consumer")
        transfer = WorkerTransfer(
            SimpleNamespace(model_runner=self.runner),
            SimpleNamespace(
                kv_transfer_config=config,
                cache_config=cache,
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
                scheduler_config=scheduling,
                lora_config=None,
                prompt_adapter_config=None,
            ),
        )
        transfer._metrics = SimpleNamespace(show_early_decode=lambda: None)  # type: ignore[assignment]
        transfer.client = client
        layout = KVLayout(self.caches, self.block_dim)
        common: dict[str, Any] = {"hidden_size": HIDDEN, "hidden_dtype": torch.float32, "count": self._count}
        if is_producer:
            transfer.producer = Producer(client, layout, **common)
        else:
            transfer.consumer = Consumer(client, layout, wait_s=20.0, agree=lambda here: here, **common)
        return transfer

    def _count(self, name: str, value: float = 1) -> None:
        self.counted[name] = self.counted.get(name, 0.0) + value

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int], *, lora: Any = None, prompt_adapter: Any = None, **sampling: Any) -> Any:
        """A request for one prompt; returns its sequence group."""
        from vllm.inputs import token_inputs
        from vllm.sampling_params import SamplingParams
        from vllm.sequence import Sequence as VllmSequence
        from vllm.sequence import SequenceGroup

        number = next(self._numbers)
        sequence = VllmSequence(number, token_inputs(list(tokens)), BLOCK_SIZE, None, lora, prompt_adapter)
        group = SequenceGroup(
            f"request {number}",
            [sequence],
            time.time(),
            SamplingParams(**sampling),
            lora_request=lora,
            prompt_adapter_request=prompt_adapter,
        )
        self.scheduler.add_seq_group(group)
        return group

    def finish(self, group: Any) -> None:
        from vllm.sequence import SequenceStatus

        group.first_seq.status = SequenceStatus.FINISHED_STOPPED
        self.scheduler.free_finished_seq_groups()

    def run_until_answered(self, *groups: Any) -> None:
        """Steps until each has its first token."""
        for _ in range(200):
            if all(group.first_seq.get_output_len() for group in groups):
                return
            self.step()
        raise AssertionError("the scheduler does not get to the end of the prompts")

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> torch.Tensor | None:
        """Schedule, plan, run the wrapped forward, take one token for each group that samples; the forward's output."""
        from vllm.worker.model_runner import ModelInputForGPUBuilder

        groups, outputs, _ = self.scheduler.schedule()
        self._swap(outputs)
        if not groups:
            return None
        builder = ModelInputForGPUBuilder(self.runner)
        for group in groups:
            builder.add_seq_group(group)
        builder.reset_cached_inter_data()
        model_input = builder.build()
        plan = self.transfer._planning(lambda seq_groups: model_input)
        plan(groups)
        metadata = model_input.attn_metadata
        slots, seq_lens = metadata.slot_mapping.tolist(), metadata.seq_lens_tensor.tolist()
        assert seq_lens == [data.seq_lens[0] if slot >= 0 else 1 for data, slot in _with_last_slots(builder, slots)]
        hidden = self.transfer._forward(lambda: self._compute(groups, builder, slots))()
        self._advance(groups, builder, self.runner.model.logits_processor._get_logits(hidden))
        return hidden  # type: ignore[no-any-return]

    def _swap(self, outputs: Any) -> None:
        """What a GPU worker does before the forward (worker/worker.py execute_worker): in, then out."""
        self.swapped_out += len(outputs.blocks_to_swap_out)
        pairs = [(self.swap_space, self.caches, outputs.blocks_to_swap_in)]
        pairs.append((self.caches, self.swap_space, outputs.blocks_to_swap_out))
        for sources, targets, moves in pairs:
            for source, target in zip(sources, targets):
                for old, new in moves:
                    target.select(self.block_dim, new).copy_(source.select(self.block_dim, old))

    def _compute(self, groups: Sequence[Any], builder: Any, slots: Sequence[int]) -> torch.Tensor:
        """A token that has no slot writes nothing; its row is what nobody may use."""
        rows: list[list[float]] = []
        for group, data in zip(groups, builder.inter_data_list):
            ((_, seq_data),) = group.seq_data.items()
            tokens, adapter = seq_data.get_token_ids(), adapter_name(group)
            for position in data.input_positions[0]:
                if slots[len(rows)] == -1:
                    rows.append([-1.0] * HIDDEN)
                    continue
                self._write(slots[len(rows)], adapter, tokens[: position + 1])
                rows.append([float(value_of(adapter, tokens[: position + 1], 99))] * HIDDEN)
                self.computed_tokens += 1
        return torch.tensor(rows)

    def _advance(self, groups: Sequence[Any], builder: Any, hidden: torch.Tensor) -> None:
        row = 0
        for group, data in zip(groups, builder.inter_data_list):
            ((_, seq_data),) = group.seq_data.items()
            row += data.query_lens[0]
            seq_data.update_num_computed_tokens(group.token_chunk_size)
            if group.do_sample:
                wanted = float(value_of(adapter_name(group), seq_data.get_token_ids(), 99))
                assert hidden[row - 1].tolist() == [wanted] * HIDDEN, f"{group.request_id}: another hidden state"
                self._append(group, int(wanted))

    def _append(self, group: Any, token: int) -> None:
        from vllm.sequence import Logprob

        for running in self.scheduler.running:
            if running.request_id == group.request_id:
                running.first_seq.append_token_id(token, {token: Logprob(0.0)})

    # --- the cache ----------------------------------------------------------------------------------------------------

    def slots(self, layer: int, block: int) -> torch.Tensor:
        """[2 (keys, values), block_size, values of a token] view of one block."""
        rows = self.caches[layer].select(self.block_dim, block)
        return rows.view(2, BLOCK_SIZE, HEADS * HEAD_SIZE)

    def _write(self, slot: int, adapter: str, tokens: Sequence[int]) -> None:
        for layer in range(LAYERS):
            slots = self.slots(layer, slot // BLOCK_SIZE)
            slots[:, slot % BLOCK_SIZE] = value_of(adapter, tokens, layer)

    def assert_cache_of(self, group: Any, first: int = 0) -> None:
        """Every computed token's keys and values, from position `first` on, are those of its whole prefix."""
        table = self.scheduler.block_manager.get_block_table(group.first_seq)
        tokens, adapter = group.first_seq.get_token_ids(), adapter_name(group)
        for position in range(first, group.first_seq.data.get_num_computed_tokens()):
            for layer in range(LAYERS):
                slot = self.slots(layer, table[position // BLOCK_SIZE])[:, position % BLOCK_SIZE]
                wanted = value_of(adapter, tokens[: position + 1], layer)
                assert (slot == wanted).all(), f"{group.request_id}: layer {layer}, token {position}"


def _with_last_slots(builder: Any, slots: Sequence[int]) -> Iterator[tuple[Any, int]]:
    """Each sequence's part of the input, and where its last token is written."""
    row = 0
    for data in builder.inter_data_list:
        row += data.query_lens[0]
        yield data, slots[row - 1]


def adapter_name(group: Any) -> str:
    lora, prompt_adapter = group.lora_request, group.prompt_adapter_request
    return f"{lora.lora_path if lora else ''}|{prompt_adapter.prompt_adapter_local_path if prompt_adapter else ''}"


def _runner(scheduling: Any, window: int | None) -> Any:
    """What ModelInputForGPUBuilder reads of its runner."""
    from vllm.attention.backends.utils import CommonMetadataBuilder
    from vllm.worker.model_runner import ModelInputForGPU

    class MetadataBuilder(CommonMetadataBuilder):  # type: ignore[type-arg]
        _metadata_cls = SimpleNamespace

    return SimpleNamespace(
        _model_input_cls=ModelInputForGPU,
        attn_backend=SimpleNamespace(make_metadata_builder=MetadataBuilder),
        scheduler_config=scheduling,
        model_config=SimpleNamespace(is_encoder_decoder=False, enforce_eager=True),
        sliding_window=window,
        block_size=BLOCK_SIZE,
        lora_config=None,
        prompt_adapter_config=None,
        multi_modal_input_mapper=None,
        inter_data_cache={},
        generators={},
        model=SimpleNamespace(logits_processor=SimpleNamespace(_get_logits=lambda hidden: hidden.clone())),
        device=torch.device("cpu"),
        pin_memory=False,
    )


# --- what tests say ----------------------------------------------------------------------------------------------------


def prompt(length: int) -> list[int]:
    """Token ids that no other test has: the agents are shared."""
    return random.Random(time.monotonic_ns()).choices(range(3, 30000), k=length)


def producer(agents: Agents, shape: Shape = FLASH, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Side:
    return Side(agents.prefill, shape, dtype, **options)


def consumer(agents: Agents, shape: Shape = FLASH, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Side:
    return Side(agents.decode, shape, dtype, **options)


def prefill(side: Side, *prompts: list[int], **adapters: Any) -> None:
    groups = [side.add(tokens, **adapters) for tokens in prompts]
    side.run_until_answered(*groups)
    for group in groups:
        side.finish(group)
