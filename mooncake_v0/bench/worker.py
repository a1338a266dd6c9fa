"""A producer or a consumer of the benchmark: what a vLLM worker has around a model, without the model.

Started by `transfer` as ``python -m mooncake_v0.bench.worker SOCKET_FD``; its first command is `open`. It holds a paged
KV cache of the shape's layers, an agent of its own, and an engine on the same pool for the raw limit, so that the limit
and the product read the same memory. Times are CLOCK_MONOTONIC seconds: both processes are on one host.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import random
import sys
import time
import zlib
from array import array
from typing import Any

import torch

from mooncake_v0.bench.child import Parent
from mooncake_v0.bench.shapes import BLOCK_TOKENS, KVShape
from mooncake_v0.config.model import Endpoint, MooncakeConfig, Role
from mooncake_v0.errors import AgentUnavailableError, TransferError
from mooncake_v0.kv.connector import Consumer, Producer, StepStore, pack_block_ids
from mooncake_v0.kv.cuda_memory import device_pools
from mooncake_v0.kv.layout import KVLayout
from mooncake_v0.kv.page_locks import page_locks
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.agent_settings import AgentSettings
from mooncake_v0.transfer.engine import EngineSettings, MooncakeEngine
from mooncake_v0.transfer.pool import ALIGNMENT_BYTES, Pool

WAIT_S = 60.0
RESERVE_S = 10.0
_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


class Worker:
    """One side. Commands are its public methods; keys are hexadecimal, sizes are in blocks."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._reserved: StepStore | None = None
        self._engine: MooncakeEngine | None = None

    def open(
        self,
        role: Role,
        shape: dict[str, Any],
        blocks: int,
        config: dict[str, Any],
        engine_port: int,
        transport: str,
        checksum: str,
        device: str,
    ) -> dict[str, Any]:
        """Make cache and pool, start agent and engine. Returns where the raw engine is to read."""
        self.shape = KVShape(**shape)
        self.layout = self._make_cache(blocks, device)
        mooncake = MooncakeConfig(
            Endpoint(**config["prefill"]), Endpoint(**config["decode"]), config["metadata_server"], "tcp"
        )
        pool_nbytes = self.shape.entry_bytes(blocks) + ALIGNMENT_BYTES  # the limit is cut to whole pages
        model = {"shape": self.shape.name}
        settings = AgentSettings(role, 0, 1, mooncake, model, pool_nbytes, transport=transport, checksum=checksum)
        self.client = AgentClient(settings, page_locks(self.layout.device), device_pools(self.layout.device))
        self.client.start()
        self.client.wait_started(WAIT_S)
        self._connect(role)
        pool = self.client.pool
        raw = pool
        if pool.on_device:
            raw = Pool.create(pool.nbytes)  # what the engine alone would read from
            raw.allocate_pages()
        raw.map_pages()
        self._raw = raw
        name = f"127.0.0.1:{engine_port}"
        self._engine = MooncakeEngine(EngineSettings(name, mooncake.metadata_server, "tcp"), raw.address, raw.nbytes)
        return {"segment_name": name, "address": raw.address}

    def peer(self) -> str:
        """How entries come to decode (on prefill any word); empty while there is no peer or that is not settled."""
        try:
            status = self.client.status()
        except AgentUnavailableError:
            return ""
        if status.engine.startswith("failed"):
            raise TransferError(f"the engine {status.engine}", fix="check that 127.0.0.1 takes tcp connections")
        if not status.peer_epoch:
            return ""
        return status.transport if status.role == "decode" else "connected"

    # --- limits -------------------------------------------------------------------------------------------------------

    def raw_read(self, segment_name: str, address: int, nbytes: int) -> float:
        """Seconds of one read by the engine from the other side's pool into ours."""
        assert self._engine is not None
        started_s = time.perf_counter()
        self._engine.read(segment_name, self._raw.address, address, nbytes)
        return time.perf_counter() - started_s

    def copy(self, nbytes: int) -> float:
        """Seconds of one contiguous copy from the pool that holds the entries into the paged cache's memory."""
        source = self.client.peer_pool or self.client.pool
        pool = source.device.tensor if source.device else torch.frombuffer(self.client.pool.map, dtype=torch.uint8)
        self._synchronize()
        started_s = time.perf_counter()
        if self.cache.is_cuda:
            self.cache[:nbytes].copy_(pool[:nbytes], non_blocking=True)
        else:
            ctypes.memmove(self.cache.data_ptr(), self.client.pool.address, nbytes)
        self._synchronize()
        return time.perf_counter() - started_s

    # --- producer -----------------------------------------------------------------------------------------------------

    def reserve(self, key: str, blocks: int) -> None:
        """Announce an entry: from now on the consumer may wait for it."""
        self._counted.clear()
        until_s = time.monotonic() + RESERVE_S
        while not (reserved := self.producer.reserve(self._plan(key, blocks))).prompts:
            if time.monotonic() > until_s:
                nbytes, reasons = self.shape.entry_bytes(blocks), ", ".join(sorted(self._counted))
                raise TransferError(f"the producer's agent did not reserve {nbytes} bytes: {reasons}")
            time.sleep(
                0.01
            )  # the pool has room for one entry, and the word that the last one was used may be on its way
        self._reserved = reserved

    def commit(self) -> float:
        """The reserved entry is complete; returns when that was said. Its bytes are what the pool holds."""
        assert self._reserved is not None
        started_s = time.monotonic()
        for stored in self._reserved.prompts:
            self.client.commit([stored.prompt.key], [self.producer.nbytes(stored.prompt)])
        self.client.in_use.leave()
        return started_s

    def store(self) -> float:
        """Gather the reserved entry from the paged cache and commit it; returns when it began."""
        hidden = torch.ones(1, self.shape.hidden_size, dtype=_DTYPES[self.shape.hidden_element_bytes])
        hidden = hidden.to(self.layout.device)
        self._synchronize()
        started_s = time.monotonic()
        assert self._reserved is not None
        self._reserved.finish(hidden)
        return started_s

    # --- consumer -----------------------------------------------------------------------------------------------------

    def select(self, key: str, blocks: int) -> float:
        """Wait for an entry; returns when its bytes were in this side's own memory.

        That is the pool; with a mapped transport, which copies nothing before, the paged cache.
        """
        raw_key = bytes.fromhex(key)
        self._parent.say("waiting")
        selected = self.client.select([raw_key], WAIT_S)
        if selected.reasons[0]:
            raise TransferError(f"the entry did not come: {selected.reasons[0]}")
        if selected.pools[0]:
            pool = self.client.peer_pool
            assert pool is not None and self.client.peer_pool_number == selected.pools[0]
            rows, _ = self.consumer.entry(pool, selected.offsets[0], selected.nbytes[0])
            self.consumer.copies.fill(self._block_ids(blocks), rows)
            self._synchronize()
        ended_s = time.monotonic()
        self.client.release([raw_key], {})
        return ended_s

    def receive(self, key: str, blocks: int) -> float:
        """Wait for an entry and scatter it into the paged cache; returns when that was done."""
        plan = self._plan(key, blocks)
        self._parent.say("waiting")
        hidden = self.consumer.receive(plan)
        self._synchronize()
        ended_s = time.monotonic()
        if hidden is None:
            misses = sorted(name for name in self._counted if name.startswith("miss_"))
            raise TransferError(f"the entry did not come: {', '.join(misses)}")
        return ended_s

    # --- contents -----------------------------------------------------------------------------------------------------

    def fill(self, seed: int) -> None:
        """Random bytes in the whole cache; also touches its pages. 0: clear it."""
        if seed:
            torch.manual_seed(seed)
            self.cache.view(torch.int64).random_()
        else:
            self.cache.zero_()
        self._synchronize()

    def checksum(self, blocks: int) -> int:
        """Of a prompt's blocks as they lie in the paged cache."""
        ids = self._block_ids(blocks)
        value = 0
        for plane in self.layout.planes:
            rows: Any = plane[ids].cpu().numpy()
            value = zlib.crc32(memoryview(rows).cast("B"), value)
        return value

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        if hasattr(self, "client"):
            self.client.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _make_cache(self, blocks: int, device: str) -> KVLayout:
        """Layers as views of one allocation, [2, blocks, block_size * kv_heads * head_size] each."""
        shape = self.shape
        dtype = _DTYPES[shape.element_bytes]
        self.cache = torch.empty(blocks * shape.block_bytes, dtype=torch.uint8, device=device)
        layers = self.cache.view(shape.layers, -1)
        words = BLOCK_TOKENS * shape.kv_heads * shape.head_size
        return KVLayout([layer.view(dtype).view(2, blocks, words) for layer in layers], 1)

    def _connect(self, role: Role) -> None:
        self._counted: set[str] = set()
        arguments: dict[str, Any] = {
            "hidden_size": self.shape.hidden_size,
            "hidden_dtype": _DTYPES[self.shape.hidden_element_bytes],
            "count": lambda name, value: self._counted.add(name),
        }
        if role == "prefill":
            self.producer = Producer(self.client, self.layout, **arguments)
        else:
            self.consumer = Consumer(self.client, self.layout, wait_s=WAIT_S, agree=lambda value: value, **arguments)

    def _plan(self, key: str, blocks: int) -> TransferPlan:
        ids = pack_block_ids(self._shuffled(blocks).tolist())
        return TransferPlan([PromptPlan(bytes.fromhex(key), ids, 0, 0, blocks * BLOCK_TOKENS)], 1, True)

    def _shuffled(self, blocks: int) -> array[int]:
        """A block table as a busy allocator leaves it; another one on each side."""
        ids = list(range(self.layout.num_blocks))
        random.Random(f"{blocks} {hasattr(self, 'producer')}").shuffle(ids)
        return array("q", ids[:blocks])

    def _block_ids(self, blocks: int) -> torch.Tensor:
        return torch.tensor(self._shuffled(blocks).tolist(), device=self.layout.device)

    def _synchronize(self) -> None:
        if self.cache.is_cuda:
            torch.cuda.synchronize()


def main(argv: list[str]) -> None:
    logging.basicConfig(level=logging.INFO)
    parent = Parent(int(argv[0]))
    worker = Worker(parent)
    commands = (
        worker.open,
        worker.peer,
        worker.raw_read,
        worker.copy,
        worker.reserve,
        worker.commit,
        worker.store,
        worker.select,
        worker.receive,
        worker.fill,
        worker.checksum,
    )
    with contextlib.closing(worker):
        parent.serve({command.__name__: command for command in commands})


if __name__ == "__main__":
    main(sys.argv[1:])
