"""Producer and consumer: what a worker does around the model's forward pass for the prompts of a plan.

Called by the vLLM plugin on every rank, in the engine step. Whatever fails here, the model's own forward pass computes the
request: slower, never wrong. Failures of the agent are counted and logged once per state; they never leave this module.
"""

from __future__ import annotations

import logging
import time
from array import array
from typing import Callable

import torch

from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.kv.layout import KVLayout
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.messages import Selected
from mooncake_v0.transfer.pool import Pool

logger = logging.getLogger(__name__)

GROUP_BYTES = 32 << 20  # of layers that are offered to the peer together; each is a read of its own
MIN_RATE_BYTES_PER_S = 100e6  # an entry in flight is waited for as long as it would take at this rate

MISSING, MAPPED, HERE = range(3)  # where a batch's entries are; the least of the group's ranks counts

Count = Callable[[str, float], None]


class Connector:
    """What producer and consumer share: the entry's shape, its memory in the pool, the counters."""

    def __init__(
        self, client: AgentClient, layout: KVLayout, *, hidden_size: int, hidden_dtype: torch.dtype, count: Count
    ) -> None:
        self.client = client
        self.layout = layout
        self.hidden_size = hidden_size
        self.hidden_dtype = hidden_dtype
        self.hidden_bytes = hidden_size * torch.empty(0, dtype=hidden_dtype).element_size()
        self._count_outside = count
        self._counters: dict[str, float] = {}

    def nbytes(self, prompt: PromptPlan) -> int:
        """Size of a prompt's entry: its blocks, then the hidden row."""
        return self.layout.nbytes(_num_blocks(prompt)) + self.hidden_bytes

    def entry(self, pool: Pool, offset: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """KV bytes (uint8) and hidden row ([hidden_size]) of an entry in a pool."""
        whole = torch.frombuffer(pool.map, dtype=torch.uint8, count=nbytes, offset=offset)
        return whole[: -self.hidden_bytes], whole[-self.hidden_bytes :].view(self.hidden_dtype)

    def block_ids(self, prompt: PromptPlan) -> torch.Tensor:
        ids = torch.frombuffer(bytearray(prompt.block_ids), dtype=torch.int32)
        return ids.to(self.layout.device, torch.int64)

    def count(self, name: str, value: float = 1) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + value
        self._count_outside(name, value)

    def take_counters(self) -> dict[str, float]:
        taken, self._counters = self._counters, {}
        return taken


class Producer(Connector):
    """Stores the KV of the prompts that a step computes."""

    def reserve(self, plan: TransferPlan) -> list[tuple[PromptPlan, int]]:
        """Before the forward: (prompt, offset) of those to store. The peer hears of them now."""
        prompts = plan.prompts
        try:
            reserved = self.client.reserve([p.key for p in prompts], [self.nbytes(p) for p in prompts])
        except AgentUnavailableError as error:
            self.count("skipped_agent_unavailable", len(prompts))
            logger.debug("nothing stored: %s", error)
            return []
        for reason in reserved.reasons:
            self.count(f"skipped_{reason}" if reason else "reserved")
        return [(prompt, offset) for prompt, offset in zip(prompts, reserved.offsets) if offset >= 0]

    def store(self, reserved: list[tuple[PromptPlan, int]], hidden_states: torch.Tensor) -> None:
        """After the forward: copy blocks and hidden rows into the pool. What is copied leaves while the rest follows."""
        for prompt, offset in reserved:
            nbytes = self.nbytes(prompt)
            started = time.perf_counter()
            kv, hidden = self.entry(self.client.pool, offset, nbytes)
            hidden.copy_(hidden_states[prompt.hidden_row])
            for ready_nbytes in self.layout.gather(self.block_ids(prompt), kv, GROUP_BYTES):
                self.client.commit([prompt.key], [nbytes if ready_nbytes == len(kv) else ready_nbytes])
            self.count("stored_prompts")
            self.count("stored_tokens", prompt.num_tokens)
            self.count("gather_seconds", time.perf_counter() - started)
        self.client.release([], self.take_counters())

    def abort(self, reserved: list[tuple[PromptPlan, int]]) -> None:
        """The forward failed."""
        self.client.abort([prompt.key for prompt, _ in reserved])


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
        with self.client.step():
            selected = self._select(plan)
            try:
                where = self._agree(MISSING if selected is None else self._where(plan, selected))
                if where == MISSING or selected is None:
                    self._count_recompute(plan, selected)
                    return None
                hidden_states = self._fill(plan, selected)
                if where == MAPPED and not self._agree(self._is_unchanged(selected)):
                    self.count("miss_reused", len(plan.prompts))  # the forward pass overwrites what was copied
                    return None
                self._count_hits(plan, selected)
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
        for number, offset, generation in zip(selected.pools, selected.offsets, selected.generations):
            if number:
                pool = self._pool(number)
                if pool is None or pool.generation_at(offset) != generation:
                    return False
        return True

    def _pool(self, number: int) -> Pool | None:
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
            pool = self._pool(selected.pools[at])
            assert pool is not None, "checked before, and pools stay for the whole step"
            kv, hidden = self.entry(pool, selected.offsets[at], selected.nbytes[at])
            self.layout.scatter(kv, self.block_ids(prompt), prompt.first_missing)
            hidden_states[prompt.hidden_row] = hidden.to(self.layout.device)
        self.count("scatter_seconds", time.perf_counter() - started)
        return hidden_states

    def _count_hits(self, plan: TransferPlan, selected: Selected) -> None:
        for prompt, nbytes in zip(plan.prompts, selected.nbytes):
            self.count("hits")
            self.count("hit_tokens", prompt.num_tokens)
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
