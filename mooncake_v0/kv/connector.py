"""Producer and consumer: what a worker does around the model's forward pass for the prompts of a plan.

Called by the vLLM plugin on every rank, in the engine step. Whatever fails here, the model's own forward pass computes the
request: slower, never wrong. Failures of the agent are counted and logged once per state; they never leave this module.
"""

from __future__ import annotations

import functools
import logging
import time
from array import array
from dataclasses import dataclass
from typing import Callable

import torch

from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.kv.copies import copies_for
from mooncake_v0.kv.layout import KVLayout
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.messages import Selected
from mooncake_v0.transfer.pool import Pool

logger = logging.getLogger(__name__)

GROUP_BYTES = 32 << 20  # of layers that are offered to the peer together; each is a read of its own
DEVICE_GROUP_BYTES = 1 << 30  # in device memory nobody has use for a part: half a millisecond of copying at the end
MIN_RATE_BYTES_PER_S = 100e6  # an entry in flight is waited for as long as it would take at this rate

TELL_EVERY_S = 1.0

MISSING, MAPPED, HERE = range(3)  # where a batch's entries are; the least of the group's ranks counts

Count = Callable[[str, float], None]


class Connector:
    """What producer and consumer share: the entry's shape, its memory in the pool, the counters."""

    def __init__(
        self, client: AgentClient, layout: KVLayout, *, hidden_size: int, hidden_dtype: torch.dtype, count: Count
    ) -> None:
        self.client = client
        self.layout = layout
        self.copies = copies_for(layout)
        self.hidden_size = hidden_size
        self.hidden_dtype = hidden_dtype
        self.hidden_bytes = hidden_size * torch.empty(0, dtype=hidden_dtype).element_size()
        self._count_outside = count
        self._counters: dict[str, float] = {}
        self._tell_again_s = 0.0

    def nbytes(self, prompt: PromptPlan) -> int:
        """Size of a prompt's entry: its blocks, then the hidden row."""
        return self.layout.nbytes(_num_blocks(prompt)) + self.hidden_bytes

    def entry(self, pool: Pool, offset: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of blocks (`KVLayout.rows`) and hidden row ([hidden_size]) of an entry in a pool."""
        if pool.device is None:
            whole = torch.frombuffer(pool.map, dtype=torch.uint8, count=nbytes, offset=offset)
        else:
            whole = pool.device.tensor[offset : offset + nbytes]
        num_blocks = (nbytes - self.hidden_bytes) // self.layout.block_bytes
        rows = self.layout.rows(whole[: -self.hidden_bytes], num_blocks)
        return rows, whole[-self.hidden_bytes :].view(self.hidden_dtype)

    def block_ids(self, block_ids: bytes) -> torch.Tensor:
        """[num_blocks] int64, on the cache's device; of int32 as bytes."""
        return self.copies.block_ids(torch.frombuffer(bytearray(block_ids), dtype=torch.int32))

    def count(self, name: str, value: float = 1) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + value
        self._count_outside(name, value)

    def tell_counters(self) -> None:
        """Let the agent know what was counted, once a second at most: it is woken up for nothing else."""
        now_s = time.monotonic()
        if now_s >= self._tell_again_s:
            self._tell_again_s = now_s + TELL_EVERY_S
            self.client.release([], self.take_counters())

    def take_counters(self) -> dict[str, float]:
        taken, self._counters = self._counters, {}
        return taken


class Producer(Connector):
    """Stores the KV of the prompts that a step computes."""

    def reserve(self, plan: TransferPlan) -> StepStore:
        """Before the forward: space for those of the plan's prompts that are to be stored. The peer hears of them now."""
        prompts = plan.prompts
        try:
            reserved = self.client.reserve([p.key for p in prompts], [self.nbytes(p) for p in prompts])
        except AgentUnavailableError as error:
            self.count("skipped_agent_unavailable", len(prompts))
            logger.debug("nothing stored: %s", error)
            return StepStore(self, [])
        for reason in reserved.reasons:
            self.count(f"skipped_{reason}" if reason else "reserved")
        stored = [self._stored(prompt, offset) for prompt, offset in zip(prompts, reserved.offsets) if offset >= 0]
        return StepStore(self, stored)

    def _stored(self, prompt: PromptPlan, offset: int) -> StoredPrompt:
        rows, hidden = self.entry(self.client.pool, offset, self.nbytes(prompt))
        return StoredPrompt(prompt, self.block_ids(prompt.block_ids), rows, hidden)


@dataclass
class StoredPrompt:
    """A prompt on its way into the pool. planes: how many leading ones are copied, or will be before what follows."""

    prompt: PromptPlan
    block_ids: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor
    planes: int = 0


class StepStore:
    """The prompts of one step on their way into the pool: layer by layer, then the hidden rows.

    Made in the step, by `Producer.reserve`; ends with `finish` or `abort`. What is complete leaves for the peer while the
    model computes the rest. The pool counts as in use until the last copy is done, which may be after the step.
    """

    def __init__(self, producer: Producer, prompts: list[StoredPrompt]) -> None:
        self.prompts = prompts
        self._producer = producer
        self._client = producer.client
        self._copies = producer.copies
        self._planes = len(producer.layout.planes)
        self._group_bytes = DEVICE_GROUP_BYTES if self._client.pool.on_device else GROUP_BYTES
        if prompts:
            self._client.in_use.enter_again()

    @property
    def follows_layers(self) -> bool:
        """Whether a part leaves before the last layer; what is small leaves as a whole."""
        return any(stored.rows.nbytes > self._group_bytes for stored in self.prompts)

    def layer_done(self, cache_address: int) -> None:
        """The model has written the blocks of the layer whose cache begins there, and of those before it."""
        end = self._producer.layout.planes_through.get(cache_address, 0)
        for stored in self.prompts:
            if (end - stored.planes) * _plane_bytes(stored) >= self._group_bytes and end < self._planes:
                self._copy(stored, end)

    def finish(self, hidden_states: torch.Tensor) -> None:
        """After the forward. hidden_states: [rows of the batch, hidden_size]"""
        for stored in self.prompts:
            self._copies.keep(hidden_states[stored.prompt.hidden_row], stored.hidden)
            self._copy(stored, self._planes)
            self._producer.count("stored_prompts")
            self._producer.count("stored_tokens", stored.prompt.num_tokens)
        self._copies.merge()
        self._client.release([], self._producer.take_counters())
        if self.prompts:
            self._copies.then(self._client.in_use.leave)

    def abort(self) -> None:
        """The forward failed, or its output is of no use."""
        if self.prompts:
            self._copies.wait()
            self._client.abort([stored.prompt.key for stored in self.prompts])
            self._client.in_use.leave()

    def _copy(self, stored: StoredPrompt, end: int) -> None:
        """Copy the planes up to `end`, some at a time; what has been copied leaves while the rest follows."""
        started = time.perf_counter()
        self._copies.branch_off()
        group = max(1, self._group_bytes // _plane_bytes(stored))
        while stored.planes < end:
            part = slice(stored.planes, min(stored.planes + group, end))
            self._copies.gather(stored.block_ids, stored.rows[part], part.start)
            stored.planes = part.stop
            if part.stop == self._planes:
                self._commit(stored, self._producer.nbytes(stored.prompt))
            elif not self._client.pool.on_device:  # whoever maps the pool has no use for a part
                self._commit(stored, part.stop * _plane_bytes(stored))
        self._producer.count("gather_seconds", time.perf_counter() - started)

    def _commit(self, stored: StoredPrompt, ready_nbytes: int) -> None:
        self._copies.then(functools.partial(self._client.commit, [stored.prompt.key], [ready_nbytes]))


class Consumer(Connector):
    """Takes the KV of a step's prompts from the buffer; only a batch that is here as a whole skips its forward.

    wait_s: how long a step waits for an entry in flight, beside the time that its bytes need at min_rate_bytes_per_s
    agree: the least of the values of the group's ranks (tensor parallelism); all ranks ask, or none
    """

    def __init__(
        self,
        client: AgentClient,
        layout: KVLayout,
        *,
        hidden_size: int,
        hidden_dtype: torch.dtype,
        count: Count,
        wait_s: float,
        agree: Callable[[int], int],
    ) -> None:
        super().__init__(client, layout, hidden_size=hidden_size, hidden_dtype=hidden_dtype, count=count)
        self.wait_s = wait_s
        self.min_rate_bytes_per_s = MIN_RATE_BYTES_PER_S
        self._agree = agree

    def receive(self, plan: TransferPlan) -> torch.Tensor | None:
        """Fill the cache and return the batch's hidden states, or None: run the forward.

        The returned tensor is [plan.num_rows, hidden_size]; only the rows that sampling reads are set.
        """
        if not plan.complete:
            self.count("miss_batch", len(plan.prompts))
            return None
        started = time.perf_counter()
        with self.client.step():
            selected = self._select(plan)
            try:
                where = self._agree(MISSING if selected is None else self._where(plan, selected))
                if where == MISSING or selected is None:
                    self._count_recompute(plan, selected)
                    return None
                hidden_states = self._fill(plan, selected)
                self.copies.wait()  # before the entries are given back, or compared again
                if where == MAPPED and not self._agree(self._is_unchanged(selected)):
                    self.count("miss_reused", len(plan.prompts))  # the forward pass overwrites what was copied
                    return None
                self._count_hits(plan, selected)
                self.count("receive_seconds", time.perf_counter() - started)
                return hidden_states
            finally:
                if selected is not None:
                    keys = [key.key for key, offset in zip(plan.prompts, selected.offsets) if offset >= 0]
                    self.client.release(keys, self.take_counters())

    def _select(self, plan: TransferPlan) -> Selected | None:
        nbytes = sum(self.nbytes(prompt) for prompt in plan.prompts)
        wait_s = self.wait_s + nbytes / self.min_rate_bytes_per_s
        started = time.perf_counter()
        try:
            return self.client.select([prompt.key for prompt in plan.prompts], wait_s)
        except AgentUnavailableError as error:
            logger.debug("nothing received: %s", error)
            return None
        finally:
            self.count("wait_seconds", time.perf_counter() - started)

    def _where(self, plan: TransferPlan, selected: Selected) -> int:
        """MISSING unless every entry is to be had and has the size that this side's cache needs."""
        for prompt, offset, nbytes in zip(plan.prompts, selected.offsets, selected.nbytes):
            if offset < 0 or nbytes != self.nbytes(prompt):
                return MISSING
        if not any(selected.pools):
            return HERE
        return MAPPED if self._is_unchanged(selected) else MISSING

    def _is_unchanged(self, selected: Selected) -> bool:
        """Whether the peer has not begun to reuse the bytes of an entry in its pool.

        The peer clears the cell before it gives the region to another entry, so a cell that is right after a copy proves
        the copy. Loads are not reordered here: x86 keeps their order, and between them lies the copy's end.
        """
        return all(map(self.is_unchanged_at, selected.pools, selected.offsets, selected.generations))

    def is_unchanged_at(self, number: int, offset: int, generation: int) -> bool:
        """As `_is_unchanged`, of one entry; always in the worker's own pool, where it is pinned."""
        pool = self.pool(number) if number else None
        return number == 0 or (pool is not None and pool.generation_at(offset) == generation)

    def pool(self, number: int) -> Pool | None:
        """The pool of this number; None for a peer's that is not mapped any more."""
        if number == 0:
            return self.client.pool
        return self.client.peer_pool if number == self.client.peer_pool_number else None

    def _fill(self, plan: TransferPlan, selected: Selected) -> torch.Tensor:
        started = time.perf_counter()
        hidden_states = torch.empty(
            (plan.num_rows, self.hidden_size), dtype=self.hidden_dtype, device=self.layout.device
        )
        for at, prompt in enumerate(plan.prompts):
            pool = self.pool(selected.pools[at])
            assert pool is not None, "checked before, and pools stay for the whole step"
            rows, hidden = self.entry(pool, selected.offsets[at], selected.nbytes[at])
            first = prompt.first_missing
            self.copies.fill(self.block_ids(prompt.block_ids)[first:], rows[:, first:])
            self.copies.take(hidden, hidden_states[prompt.hidden_row])
        self.count("scatter_seconds", time.perf_counter() - started)
        return hidden_states

    def _count_hits(self, plan: TransferPlan, selected: Selected) -> None:
        for prompt, nbytes in zip(plan.prompts, selected.nbytes):
            self.count_hit(prompt.num_tokens, nbytes)

    def count_hit(self, num_tokens: int, nbytes: int) -> None:
        self.count("hits")
        self.count("hit_tokens", num_tokens)
        self.count("hit_bytes", nbytes)

    def _count_recompute(self, plan: TransferPlan, selected: Selected | None) -> None:
        """Why each prompt of this batch is computed here."""
        if selected is None:
            self.count("miss_agent_unavailable", len(plan.prompts))
            return
        for prompt, nbytes, reason in zip(plan.prompts, selected.nbytes, selected.reasons):
            if not reason and nbytes != self.nbytes(prompt):
                reason = "wrong_size"
            self.count(f"miss_{reason or 'batch'}")


def pack_block_ids(block_table: list[int]) -> bytes:
    return array("i", block_table).tobytes()


def _num_blocks(prompt: PromptPlan) -> int:
    return len(prompt.block_ids) // 4


def _plane_bytes(stored: StoredPrompt) -> int:
    return max(1, stored.rows[0].nbytes)
