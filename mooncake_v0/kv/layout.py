"""Where a block's bytes are in a paged KV cache; gather and scatter of whole blocks.

Blocks are copied whole, as raw bytes, along the backend's block dimension. So the copy does not depend on the attention
backend's inner layout, head counts, head size, quantisation or tensor parallelism, only on where the blocks are
(vllm 0.6.4.post1, attention/backends/*.py, get_kv_cache_shape)::

    FlashAttention              (2, num_blocks, block_size, num_kv_heads, head_size)
    xformers, torch SDPA, ROCm  (2, num_blocks, block_size * num_kv_heads * head_size)
    FlashInfer                  (num_blocks, 2, block_size, num_kv_heads, head_size)

A cache is seen as planes: [num_blocks, row_bytes] views of the layers' tensors, e.g. keys of layer 0, values of layer 0,
keys of layer 1 and so on. An entry holds the selected rows of each plane, plane after plane, then the hidden row.

A copy of some MiB takes a GPU less time than starting a kernel for each plane, and is too little for each plane to be shared
by two threads of a CPU. So all planes are also seen as one tensor of rows, from which one kernel takes all (`_Span`).
"""

from __future__ import annotations

import ctypes
import math
from typing import Callable, Sequence

import torch

from mooncake_v0.errors import KVLayoutError

_PROBE_BLOCKS = (1009, 2003)
SPAN_COPY_BYTES = 256 << 20  # of larger copies each plane's own is long enough
_MIN_SPAN_ROW_BYTES = 512


def find_block_dim(get_shape: Callable[[int], Sequence[int]]) -> int:
    """The dimension of a backend's cache shape that counts blocks.

    get_shape: number of blocks → shape, e.g. a partial of AttentionBackend.get_kv_cache_shape.
    Raises KVLayoutError if not exactly one dimension is the number of blocks.
    """
    shapes = [tuple(get_shape(blocks)) for blocks in _PROBE_BLOCKS]
    dims = [dim for dim, sizes in enumerate(zip(*shapes)) if sizes == _PROBE_BLOCKS]
    if len(dims) != 1:
        raise KVLayoutError(
            f"a KV cache of shape {shapes[0]} for {_PROBE_BLOCKS[0]} blocks has no single block dimension",
            fix="use an attention backend that stores one block at one index: FlashAttention, xformers, SDPA, FlashInfer",
        )
    return dims[0]


class KVLayout:
    """The planes of one rank's KV cache. Holds views of the cache, never copies."""

    def __init__(self, kv_caches: Sequence[torch.Tensor], block_dim: int, *, one_kernel: bool = True) -> None:
        """kv_caches: one tensor per layer, contiguous; empty tensors (layers without attention) are skipped.

        one_kernel: whether small copies take all planes at once
        """
        self.planes: list[torch.Tensor] = []
        self.planes_through: dict[int, int] = {}  # address of a layer's cache → planes up to and with this layer
        for layer, cache in enumerate(kv_caches):
            if cache.numel():
                self.planes += _planes(cache, block_dim, layer)
                self.planes_through[cache.data_ptr()] = len(self.planes)
        if not self.planes:
            raise KVLayoutError("the KV cache is empty", fix="serve a model with attention layers")
        shapes = {tuple(plane.shape) for plane in self.planes}
        if len(shapes) != 1:
            raise KVLayoutError(f"the layers' KV caches differ: {sorted(shapes)} blocks and bytes a block")
        self.num_blocks, self.row_words = self.planes[0].shape
        self.row_bytes = self.row_words * self.planes[0].element_size()
        self.block_bytes = self.row_bytes * len(self.planes)
        self.device = self.planes[0].device
        self._span = _Span.over(self.planes) if one_kernel else None

    def nbytes(self, num_blocks: int) -> int:
        """Size of the KV part of an entry of so many blocks."""
        return num_blocks * self.block_bytes

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor, start: int = 0) -> None:
        """Copy blocks of the planes from `start` on. Same as ``rows[i] = planes[start + i][block_ids]`` for each row.

        block_ids: int64 [num_blocks]
        rows:      [some planes, num_blocks, row_words]; both on the cache's device
        """
        if self._span is not None and _fits_one_kernel(rows):
            torch.index_select(
                self._span.rows, 0, self._span.index(block_ids, start, len(rows)), out=self._span.view(rows)
            )
            return
        for plane, row in zip(self.planes[start:], rows):
            torch.index_select(plane, 0, block_ids, out=row)

    def scatter(self, rows: torch.Tensor, block_ids: torch.Tensor, start: int = 0) -> None:
        """The way back: ``planes[start + i][block_ids] = rows[i]`` for each row."""
        if self._span is not None and _fits_one_kernel(rows):
            self._span.rows.index_copy_(0, self._span.index(block_ids, start, len(rows)), self._span.view(rows))
            return
        for plane, row in zip(self.planes[start:], rows):
            plane.index_copy_(0, block_ids, row)

    def rows(self, entry: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """[planes, num_blocks, row_words] view of an entry's KV bytes (uint8, contiguous)."""
        if entry.dtype != torch.uint8 or entry.numel() != self.nbytes(num_blocks):
            raise KVLayoutError(
                f"an entry of {entry.numel()} bytes ({entry.dtype}) does not hold {num_blocks} blocks of "
                f"{self.block_bytes} bytes"
            )
        return entry.view(self.planes[0].dtype).view(len(self.planes), num_blocks, self.row_words)


class _Span:
    """All memory from the first plane to the last as one tensor of rows, of which each block of each plane is some.

    Between the planes lies memory of others, which no index names. rows: [number, words]
    """

    def __init__(self, planes: Sequence[torch.Tensor], unit: int) -> None:
        first = min(plane.data_ptr() for plane in planes)
        end = max(plane.data_ptr() + plane.nbytes for plane in planes)
        device, row_bytes = planes[0].device, planes[0][0].nbytes
        memory = tensor_at(first, end - first, device)  # a multiple of unit: whole blocks
        self.rows = memory.view(planes[0].dtype).view(-1, unit // planes[0].element_size())
        starts = [(plane.data_ptr() - first) // unit for plane in planes]
        self._starts = torch.tensor(starts, device=device).view(-1, 1, 1)
        self._parts = torch.arange(row_bytes // unit, device=device)

    @classmethod
    def over(cls, planes: Sequence[torch.Tensor]) -> _Span | None:
        """None where the planes do not lie whole rows apart, not even rows of a fraction of a block."""
        first = min(plane.data_ptr() for plane in planes)
        unit = math.gcd(planes[0][0].nbytes, *(plane.data_ptr() - first for plane in planes))
        return cls(planes, unit) if unit >= _MIN_SPAN_ROW_BYTES else None

    def index(self, block_ids: torch.Tensor, start: int, count: int) -> torch.Tensor:
        """Rows of these blocks in `count` planes from `start` on, in an entry's order."""
        parts = block_ids.unsqueeze(1) * len(self._parts) + self._parts
        return (self._starts[start : start + count] + parts).flatten()

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """[some planes, num_blocks, row_words] of an entry, as rows of the span."""
        return rows.view(-1, self.rows.shape[1])


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that is there already, as uint8 [nbytes]; the caller keeps it there."""
    if device.type == "cuda":
        return torch.as_tensor(_Interface(address, nbytes), device=device)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


class _Interface:
    """What torch reads to make a tensor of memory on a GPU."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def _fits_one_kernel(rows: torch.Tensor) -> bool:
    return rows.nbytes <= SPAN_COPY_BYTES and rows.is_contiguous()


def _planes(cache: torch.Tensor, block_dim: int, layer: int) -> list[torch.Tensor]:
    """[num_blocks, words] views of one layer's cache, one per index of the dimensions before the block dimension."""
    if not cache.is_contiguous():
        raise KVLayoutError(f"the KV cache of layer {layer} is not contiguous: shape {tuple(cache.shape)}")
    parts = cache.flatten(0, block_dim - 1).unbind(0) if block_dim else (cache,)
    flat = [part.reshape(part.shape[0], -1).view(torch.uint8) for part in parts]
    word = _widest_word(flat[0].shape[1])
    return [part.view(word) for part in flat]


def _widest_word(row_bytes: int) -> torch.dtype:
    """The largest type that a row is made of; index operations move one element a thread, so wide ones are faster."""
    for word in (torch.complex128, torch.int64):
        if row_bytes % word.itemsize == 0:
            return word
    return torch.uint8
