"""Lets a prompt whose KV came from prefill join the running requests without a step of its own.

vLLM computes a prompt in a step during which nothing else runs. On decode there is nothing to compute, but that step's
scheduling, input tensors and copies still stop every running answer, for 20 ms at 16,384 tokens (an 8B model on an H200).
So while others run, a request that `ParkingLot` holds back gets its blocks already; they are filled beside the others'
steps (`kv.filling`), and then the request joins them as one that has computed all but its prompt's last token. In its first
step its row of the batch computes that token once more. The result is not used: the row's logits are made of the hidden row
that came with the entry, alone as they would be in a step of its own, and what it would write into the cache goes nowhere.
So that row is told that there is nothing before its token: its attention to 16,384 tokens cost the whole batch 2 ms.
So the answer is the same to the last bit as with a step of its own.

Needs the scheduler and the only worker in one process, and none of what vLLM decides in a prompt's step (`can_join`). What
is wrapped here, on objects (vllm 0.6.4.post1)::

    BlockSpaceManager.free         a request that ends or is preempted meanwhile: core/block_manager.py
    Scheduler._can_append_slots    blocks of requests that are held back are the first to go: core/scheduler.py
    LogitsProcessor._get_logits    model_executor/layers/logits_processor.py
    LLMEngine._get_stats           counts the first step of such a request as what it is, a prompt's: engine/llm_engine.py
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch

from mooncake_v0.kv.connector import Consumer, pack_block_ids
from mooncake_v0.kv.filling import Filling
from mooncake_v0.vllm_plugin.wrapping import wrap_once

STEP_BYTES = 512 << 20  # copied beside one step: a millisecond or two of a GPU's memory
TOKEN_BYTES = 128 << 10  # to give a token its place in a block costs a step as much as to copy so much: 3 us a block
_PAD_SLOT_ID = -1  # attention/backends/utils.py:12: nothing is written
_FIRST_STEP = "mooncake_v0_first_step"  # attribute of a sequence group: prompt tokens that its next step completes

Row = tuple[int, torch.Tensor]  # of the batch, and the hidden row for it


def can_join(vllm_config: Any, runner: Any) -> bool:
    """Whether requests may join so: nothing else depends on a prompt's own step.

    With prefix caching a block counts as computed as soon as any prompt's step has run (core/block_manager.py:277), with a
    sliding window, LoRA, prompt adapters or an inner state, a prompt's step does more than to fill blocks.
    """
    scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
    return not (
        vllm_config.parallel_config.tensor_parallel_size > 1
        or cache.enable_prefix_caching
        or cache.sliding_window is not None
        or runner.sliding_window is not None
        or vllm_config.lora_config is not None
        or vllm_config.prompt_adapter_config is not None
        or getattr(runner, "has_inner_state", False)
        or scheduler.policy != "fcfs"
        or scheduler.send_delta_data
        or not hasattr(getattr(runner.model, "logits_processor", None), "_get_logits")
    )


@dataclass
class Held:
    """A request that is held back and has blocks, or some of them. table: its BlockTable (core/block/block_table.py)."""

    group: Any
    seq: Any
    table: Any
    filling: Filling

    @property
    def lacks_blocks(self) -> bool:
        return bool(self.table.num_full_slots < self.seq.get_len())


class FillAhead:
    """Wraps one scheduler's block manager; used by its `ParkingLot`. joined: where the worker finds hidden rows."""

    def __init__(self, scheduler: Any, consumer: Consumer, joined: JoinedRows) -> None:
        self._scheduler = scheduler
        self._blocks = scheduler.block_manager
        self._consumer = consumer
        self._joined = joined
        self._held: dict[str, Held] = {}  # by request
        self._left = 0  # of STEP_BYTES
        wrap_once(self._blocks, "free", self._with_end)
        wrap_once(scheduler, "_can_append_slots", self._with_room)

    @property
    def names(self) -> list[str]:
        """Requests that have blocks and wait for their KV."""
        return list(self._held)

    def get(self, name: str) -> Filling | None:
        held = self._held.get(name)
        return None if held is None else held.filling

    def begin(self, group: Any, key: bytes, *, has_all: bool) -> bool:
        """Give a waiting request its first blocks. False: there are not enough, with the next step of those that run.

        has_all: its entry is settled; if it is not to be had, the request gets no blocks
        """
        from vllm.core.block.block_table import BlockTable
        from vllm.core.interfaces import AllocStatus

        blocks, (seq,) = self._blocks, group.get_seqs()
        needed = -(-seq.get_len() // blocks.block_size)
        if not self._has_room(len(self._held) + 1) or blocks.can_allocate(group) != AllocStatus.OK:
            return False
        if not self._has_free(needed + len(self._scheduler.running)):
            return False
        filling = Filling(self._consumer, key, num_tokens=seq.get_len(), num_blocks=needed)
        if has_all and not filling.take_all():
            return True
        # as BlockSpaceManager.allocate, which gives all blocks at once: 3 ms for 16,384 tokens
        table = BlockTable(blocks.block_size, blocks.block_allocator)
        self._add_blocks(table, seq)
        blocks.block_tables[seq.seq_id] = table
        blocks._computed_blocks_tracker.add_seq(seq.seq_id)
        blocks._last_access_blocks_tracker.add_seq(seq.seq_id)
        self._held[group.request_id] = Held(group, seq, table, filling)
        return True

    def start_step(self) -> None:
        """A step is to be scheduled: beside it not more is done than it bears, where something runs."""
        self._left = STEP_BYTES if self._scheduler.running else 1 << 62

    def advance(self) -> None:
        """Give blocks and copy on."""
        for name, held in list(self._held.items()):
            if self._left > 0 and (held.filling.has_blocks or self._give_blocks(name, held)):
                self._left -= held.filling.advance(self._left)

    def _give_blocks(self, name: str, held: Held) -> bool:
        """Some more of them. False: they are not complete yet, or there are none left and the request has lost all."""
        if held.lacks_blocks and not self._add_blocks(held.table, held.seq):
            self.give_up(name)
        if held.lacks_blocks:
            return False
        held.filling.into(pack_block_ids(held.table.physical_block_ids))
        return True

    def _add_blocks(self, table: Any, seq: Any) -> bool:
        """As many as this step bears, to the end of a BlockTable. False: so many are not free.

        As BlockTable.allocate does for all of a prompt at once; its append_token_ids takes three times as long.
        """
        from vllm.utils import Device

        size: int = self._blocks.block_size
        start = table.num_full_slots
        tokens = seq.get_token_ids()[start : start + max(1, self._left // (TOKEN_BYTES * size)) * size]
        if not self._has_free(-(-len(tokens) // size) + len(self._scheduler.running)):
            return False
        self._left -= TOKEN_BYTES * len(tokens)
        last = table.blocks[-1] if start else None
        for block in table._allocate_blocks_for_token_ids(last, tokens, Device.GPU):
            table._blocks.append(block)
        table._num_full_slots += len(tokens)
        return True

    def _has_free(self, blocks: int) -> bool:
        return bool(self._blocks.get_num_free_gpu_blocks() - blocks >= self._blocks.watermark_blocks)

    def _has_room(self, more: int) -> bool:
        """Whether so many more requests may run."""
        scheduler = self._scheduler
        return not scheduler.swapped and len(scheduler.running) + more <= int(scheduler.scheduler_config.max_num_seqs)

    def join_ended(self) -> list[str]:
        """Let requests run whose copies have ended. Returns those that are not held back any more, however it went."""
        ended = []
        for name, held in list(self._held.items()):
            if held.filling.has_ended and self._has_room(1):
                self._join(name)
                ended.append(name)
        return ended

    def _join(self, name: str) -> None:
        """Or let vLLM compute its prompt, if its KV was no good."""
        from vllm.sequence import SequenceStage, SequenceStatus

        held = self._held.pop(name)
        seq = held.seq
        if not held.filling.check():
            self._blocks.free(seq)
            return
        seq.status = SequenceStatus.RUNNING
        seq.data.update_num_computed_tokens(seq.get_len() - 1)
        seq.data._stage = SequenceStage.DECODE
        self._joined.add(held.group, held.filling.hidden)
        self._scheduler.waiting.remove(held.group)
        self._scheduler.running.append(held.group)

    def give_up(self, name: str) -> None:
        """Take a held request's blocks back."""
        self._blocks.free(self._held[name].seq)

    def _with_end(self, free: Callable[[Any], None]) -> Callable[[Any], None]:
        def wrapped(seq: Any) -> None:
            if self._held or self._joined:
                self._forget(seq)
            free(seq)

        return wrapped

    def _forget(self, seq: Any) -> None:
        """A sequence loses its blocks: nothing may be copied into them from now on."""
        for name, held in list(self._held.items()):
            if held.seq is seq:
                del self._held[name]
                held.filling.give_up()
        self._joined.forget(seq)

    def _with_room(self, can_append: Callable[..., bool]) -> Callable[..., bool]:
        """Whoever runs gets a block before vLLM preempts another: from those that are held back, the last one first."""

        def wrapped(*args: Any, **kwargs: Any) -> bool:
            while not can_append(*args, **kwargs):
                if not self._held:
                    return False
                self.give_up(next(reversed(self._held)))
            return True

        return wrapped


class JoinedRows:
    """Hidden rows of requests that have joined, until their first step; in that step, which rows of the batch they are."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._hidden: dict[int, tuple[Any, torch.Tensor]] = {}  # by sequence: its group, the row
        self._rows: list[Row] = []
        wrap_once(runner.model.logits_processor, "_get_logits", self._with_rows)

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def add(self, group: Any, hidden: torch.Tensor) -> None:
        """Before the request's first step. Seeds it, as vLLM does in a prompt's step (sampling_metadata.py:266)."""
        (seq,) = group.get_seqs()
        self._hidden[seq.seq_id] = group, hidden
        setattr(group, _FIRST_STEP, seq.get_len())
        seed = group.sampling_params.seed
        if seed is not None:
            self._runner.generators[group.request_id] = torch.Generator(self._runner.device).manual_seed(seed)

    def forget(self, seq: Any) -> None:
        found = self._hidden.pop(seq.seq_id, None)
        if found is not None:
            delattr(found[0], _FIRST_STEP)

    def place(self, seq_groups: Sequence[Any], model_input: Any) -> None:
        """In a step without prompts: find the rows; let them write nothing into the cache, and look at one token of it."""
        self._rows = []
        if not self._hidden or not seq_groups or seq_groups[0].is_prompt:
            return
        sequences = [seq_id for group in seq_groups for seq_id in group.seq_data]
        for row, seq_id in enumerate(sequences):
            found = self._hidden.pop(seq_id, None)
            if found is not None:
                metadata = model_input.attn_metadata
                metadata.slot_mapping[row] = _PAD_SLOT_ID
                metadata.seq_lens_tensor[row] = 1
                self._rows.append((row, found[1]))

    def _with_rows(self, get_logits: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            logits = get_logits(hidden_states, *args, **kwargs)
            rows, self._rows = self._rows, []
            for row, hidden in rows:
                logits[row] = get_logits(hidden.unsqueeze(0), *args, **kwargs)[0]
            return logits

        return wrapped


def count_first_steps(engine: Any) -> None:
    """Let the engine's own metrics see a joined request's first step as one of a prompt.

    Else its time to first token would be counted as time per output token, and its prompt not at all.
    """
    wrap_once(engine, "_get_stats", _with_first_steps)


def _with_first_steps(get_stats: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(
        outputs: Any, model_output: Any = None, finished_before: Any = None, skip: Any = None, **kwargs: Any
    ) -> Any:
        groups = outputs.scheduled_seq_groups if outputs is not None else []
        first = [at for at, one in enumerate(groups) if hasattr(one.seq_group, _FIRST_STEP)]
        if not first:
            return get_stats(outputs, model_output, finished_before, skip, **kwargs)
        order = first + [at for at in range(len(groups)) if at not in first]
        before, skipped = ([order.index(at) for at in numbers or ()] for numbers in (finished_before, skip))
        return get_stats(_as_prompts(outputs, order, len(first)), model_output, before, skipped, **kwargs)

    return wrapped


def _as_prompts(outputs: Any, order: list[int], count: int) -> Any:
    """A step's SchedulerOutputs with its groups in another order, the first ones as prompts."""
    changed = copy.copy(outputs)
    changed.scheduled_seq_groups = [outputs.scheduled_seq_groups[at] for at in order]
    changed.num_prefill_groups = count
    for at in range(count):
        one = changed.scheduled_seq_groups[at] = copy.copy(changed.scheduled_seq_groups[at])
        one.token_chunk_size = getattr(one.seq_group, _FIRST_STEP)
        changed.num_batched_tokens += one.token_chunk_size - 1
        delattr(one.seq_group, _FIRST_STEP)
    return changed
