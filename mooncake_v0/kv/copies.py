"""How bytes get from a paged cache into a pool and back: on the CPU at once, on a GPU beside the model's own work.

A producer and a consumer each have one object of this module for their layout's device. On a GPU a producer's copies run on
a stream of their own: it waits for the layers that have written their blocks, gathers these on the device and, unless the
pool is device memory itself, copies on into page-locked host memory. The model's stream waits for the gathering only,
since the blocks may be given to another request afterwards. A thread waits for the copies and says what is complete; the
engine step never does. The thread watches a word of host memory that the stream itself counts up: any call into CUDA would
wait as long as the engine step's own waits for the whole forward pass (seen on an H200 with torch 2.11).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any, Callable, Iterator, Union

import torch

from mooncake_v0.kv.layout import KVLayout

logger = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # whose streams and events have no types

POLL_S = 0.0001
_NUMBERS = 1 << 16  # the stream's counter starts again there
SCRATCH_BYTES = 64 << 20  # of device memory between a paged cache and a pool in host memory


class HostCopies:
    """Everything is done when a call returns."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def block_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Indices for the layout's device (int64), from int32 on the host."""
        return ids.to(torch.int64)

    def branch_off(self) -> None:
        """What follows copies what the model has computed until now."""

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        """Copy blocks of the planes from `start` on into rows of an entry in the pool, see `KVLayout.gather`."""
        self._layout.gather(block_ids, rows, start)

    def keep(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a row of the model's output into the pool."""
        out.copy_(row)

    def then(self, action: Callable[[], None]) -> None:
        """Call when all copies until now are done."""
        action()

    def merge(self) -> None:
        """The model's next work may overwrite what was to be gathered."""

    def precede(self) -> None:
        """The model's next work comes after everything asked for."""

    def wait(self) -> None:
        """Until everything asked for is done."""

    def fill(self, block_ids: torch.Tensor, rows: torch.Tensor, start: int = 0) -> None:
        """Copy rows of an entry into the planes of the cache from `start` on."""
        self._layout.scatter(rows, block_ids, start)

    def take(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a row out of the pool."""
        out.copy_(row)


class CudaCopies:
    """As HostCopies, on a GPU and on a stream of its own."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._device = layout.device
        self._stream = _cuda.Stream(self._device, priority=-1)
        self._gathered = _cuda.Event()
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=self._device)
        self._numbers = torch.arange(_NUMBERS, device=self._device)
        self._reached = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._asked = 0
        self._actions: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="kv-copies", daemon=True)

    def block_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.to(torch.int64).pin_memory().to(self._device, non_blocking=True)

    def branch_off(self) -> None:
        self._stream.wait_stream(_cuda.current_stream(self._device))

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor, start: int) -> None:
        block_ids.record_stream(self._stream)
        with _cuda.stream(self._stream):
            if rows.is_cuda:
                self._layout.gather(block_ids, rows, start)
                self._gathered.record()
                return
            for planes, blocks, piece in self._pieces(rows):
                self._layout.gather(block_ids[blocks], piece, start + planes.start)
                self._gathered.record()
                rows[planes, blocks].copy_(piece, non_blocking=True)

    def keep(self, row: torch.Tensor, out: torch.Tensor) -> None:
        row = row.clone()  # by the model's stream: the output's memory is given to others after the step
        row.record_stream(self._stream)
        self.branch_off()
        with _cuda.stream(self._stream):
            out.copy_(row, non_blocking=True)

    def then(self, action: Callable[[], None]) -> None:
        self._asked = (self._asked + 1) % _NUMBERS
        with _cuda.stream(self._stream):
            self._reached.copy_(self._numbers[self._asked : self._asked + 1], non_blocking=True)
        if self._thread.ident is None:
            self._thread.start()
        self._actions.put((self._asked, action))

    def merge(self) -> None:
        _cuda.current_stream(self._device).wait_event(self._gathered)

    def precede(self) -> None:
        _cuda.current_stream(self._device).wait_stream(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()

    def fill(self, block_ids: torch.Tensor, rows: torch.Tensor, start: int = 0) -> None:
        self.branch_off()
        block_ids.record_stream(self._stream)
        with _cuda.stream(self._stream):
            if rows.is_cuda:
                self._layout.scatter(rows, block_ids, start)
                return
            for planes, blocks, piece in self._pieces(rows):
                piece.copy_(rows[planes, blocks], non_blocking=True)
                self._layout.scatter(piece, block_ids[blocks], start + planes.start)

    def take(self, row: torch.Tensor, out: torch.Tensor) -> None:
        self.branch_off()
        out.record_stream(self._stream)
        with _cuda.stream(self._stream):
            out.copy_(row, non_blocking=True)

    def _pieces(self, rows: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Parts of an entry's rows, each one stretch of host memory, and as much scratch on the device."""
        num_planes, num_blocks, row_words = rows.shape
        words = self._scratch.view(rows.dtype)
        some_planes = max(1, len(words) // max(1, num_blocks * row_words)) if rows.is_contiguous() else 1
        some_blocks = max(1, len(words) // row_words)
        for plane in range(0, num_planes, some_planes):
            planes = slice(plane, min(plane + some_planes, num_planes))
            for block in range(0, num_blocks, some_blocks):
                blocks = slice(block, min(block + some_blocks, num_blocks))
                shape = (planes.stop - planes.start, blocks.stop - blocks.start, row_words)
                yield planes, blocks, words[: shape[0] * shape[1] * row_words].view(shape)

    def _watch(self) -> None:
        """Call what was to be called after copies, in their order; for as long as the worker lives."""
        reached = self._reached.numpy()
        while True:
            number, action = self._actions.get()
            while (int(reached[0]) - number) % _NUMBERS >= _NUMBERS // 2:
                time.sleep(POLL_S)
            try:
                action()
            except Exception:  # a thread that ended would leave its callers waiting for ever
                logger.exception("what follows a copy has failed")


Copies = Union[HostCopies, CudaCopies]


def copies_for(layout: KVLayout) -> Copies:
    return CudaCopies(layout) if layout.device.type == "cuda" else HostCopies(layout)
