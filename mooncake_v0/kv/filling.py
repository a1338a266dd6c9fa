"""A prompt's entry on its way into blocks of the cache, while the engine goes on with other requests.

Made by decode's scheduler hooks (`vllm_plugin.fill_ahead`) for a request that is held back. What is in the pool already may
be copied while the rest of the entry arrives; nothing of it counts before the agent has given the whole entry, at the same
place. On a GPU the copies run beside the model's own work; on a CPU they are done when a call returns.

Life: `follow` what is here, `take_all` once the agent says that the entry is settled, `advance` in every step, `has_ended`;
then `check` says whether the cache has the prompt's KV. `give_up` at any time before: the blocks may be used for something
else at once. One thread, the engine step's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.transfer.messages import Arriving

if TYPE_CHECKING:
    from mooncake_v0.kv.connector import Consumer


@dataclass(frozen=True)
class Place:
    """Where an entry lies: number of the pool (0: the worker's own), offset in bytes, generation."""

    pool: int
    offset: int
    generation: int


class Filling:
    """hidden: [hidden_size], the prompt's last hidden row, once `has_ended`."""

    def __init__(self, consumer: Consumer, key: bytes, *, num_tokens: int, num_blocks: int) -> None:
        self.nbytes = consumer.layout.nbytes(num_blocks) + consumer.hidden_bytes
        self.hidden = torch.empty(consumer.hidden_size, dtype=consumer.hidden_dtype, device=consumer.layout.device)
        self._consumer = consumer
        self._client = consumer.client
        self._copies = consumer.copies
        self._key = key
        self._num_tokens = num_tokens
        self._block_ids: torch.Tensor | None = None
        self._place: Place | None = None
        self._planes = 0  # whose copies were asked for
        self._ready_planes = 0
        self._plane_bytes = max(1, (self.nbytes - consumer.hidden_bytes) // len(consumer.layout.planes))
        self._pinned = False
        self._has_asked_for_all = False
        self._ended = threading.Event()

    @property
    def has_blocks(self) -> bool:
        """Whether it was told them."""
        return self._block_ids is not None

    @property
    def has_all(self) -> bool:
        """Whether the agent has given the entry: nothing more is to be waited for but the copies."""
        return self._pinned

    @property
    def has_ended(self) -> bool:
        """Whether the last copy is done."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        """For the last copy."""
        self._ended.wait(timeout_s)

    def into(self, block_ids: bytes) -> None:
        """The blocks for it, int32 as bytes."""
        self._block_ids = self._consumer.block_ids(block_ids)

    def follow(self, arriving: Arriving) -> None:
        """This much of the entry is here, and not confirmed yet."""
        if arriving.nbytes == self.nbytes and not self._pinned:
            self._begin_at(Place(0, arriving.offset, arriving.generation))
            self._ready_planes = min(arriving.ready_nbytes // self._plane_bytes, len(self._consumer.layout.planes))

    def take_all(self) -> bool:
        """Take the settled entry, or say that it is not to be had."""
        try:
            selected = self._client.select([self._key], 0.0)
        except AgentUnavailableError:
            return False
        if selected.offsets[0] < 0:
            return False
        self._pinned = True
        if selected.nbytes[0] != self.nbytes:
            self._release({})
            return False
        self._begin_at(Place(selected.pools[0], selected.offsets[0], selected.generations[0]))
        self._ready_planes = len(self._consumer.layout.planes)
        return True

    def _begin_at(self, place: Place) -> None:
        if place != self._place:
            self._place, self._planes = place, 0

    def advance(self, limit_bytes: int) -> int:
        """Copy what is here, at most about so much. Returns the bytes whose copies were asked for."""
        place, start = self._place, self._planes
        end = min(self._ready_planes, start + max(1, limit_bytes // self._plane_bytes))
        is_last = self._pinned and end == len(self._consumer.layout.planes)
        if place is None or self._block_ids is None or self._has_asked_for_all or (start >= end and not is_last):
            return 0
        with self._client.step():
            pool = self._consumer.pool(place.pool)
            if pool is None:  # it is not mapped any more; `check` will find that, too
                self._has_asked_for_all = True
                self._ended.set()
                return 0
            rows, hidden = self._consumer.entry(pool, place.offset, self.nbytes)
            self._client.in_use.enter_again()
            if start < end:
                self._copies.fill(self._block_ids, rows[start:end], start)
            if is_last:
                self._copies.take(hidden, self.hidden)
            self._copies.then(self._end if is_last else self._client.in_use.leave)
        self._planes, self._has_asked_for_all = end, is_last
        return (end - start) * self._plane_bytes

    def _end(self) -> None:
        self._client.in_use.leave()
        self._ended.set()

    def check(self) -> bool:
        """After the last copy: whether the bytes were good all along. The entry is given back, and counted as a hit."""
        place, consumer = self._place, self._consumer
        good = place is not None and consumer.is_unchanged_at(place.pool, place.offset, place.generation)
        if good:
            consumer.count_hit(self._num_tokens, self.nbytes)
            consumer.count("filled_ahead")
        self._release(consumer.take_counters())
        return good

    def give_up(self) -> None:
        """Whatever uses the blocks next comes after the copies that were asked for."""
        self._copies.precede()
        self._copies.then(lambda: self._release({}))

    def _release(self, counters: dict[str, float]) -> None:
        if self._pinned:
            self._pinned = False
            self._client.release([self._key], counters)
