"""Where a block's bytes are in a paged KV cache; gather and scatter of whole blocks.

Blocks are copied whole, as raw bytes, along the backend's block dimension. So the copy does not depend on the attention
backend's inner layout, head counts, head size, quantisation or tensor parallelism, only on where the blocks are
(vllm 0.6.4.post1, attention/backends/*.py, get_kv_cache_shape)::

    FlashAttention              (2, num_blocks, block_size, num_kv_heads, head_size)
    xformers, torch SDPA, ROCm  (2, num_blocks, block_size * num_kv_heads * head_size)
    FlashInfer                  (num_blocks, 2, block_size, num_kv_heads, head_size)

A cache is seen as planes: [num_blocks, row_bytes] views of the layers' tensors, e.g. keys of layer 0, values of layer 0,
keys of layer 1 and so on. An entry holds the selected rows of each plane, plane after plane, then the hidden row.
"""

from __future__ import annotations

from typing import Callable, Sequence

import torch

from mooncake_v0.errors import KVLayoutError

_PROBE_BLOCKS = (1009, 2003)


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

    def __init__(self, kv_caches: Sequence[torch.Tensor], block_dim: int) -> None:
        """kv_caches: one tensor per layer, contiguous; empty tensors (layers without attention) are skipped."""
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

    def nbytes(self, num_blocks: int) -> int:
        """Size of the KV part of an entry of so many blocks."""
        return num_blocks * self.block_bytes

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor, start: int = 0) -> None:
        """Copy blocks of the planes from `start` on. Same as ``rows[i] = planes[start + i][block_ids]`` for each row.

        block_ids: int64 [num_blocks]
        rows:      [some planes, num_blocks, row_words]; both on the cache's device
        """
        for plane, row in zip(self.planes[start:], rows):
            torch.index_select(plane, 0, block_ids, out=row)

    def scatter(self, rows: torch.Tensor, block_ids: torch.Tensor, start: int = 0) -> None:
        """The way back: ``planes[start + i][block_ids] = rows[i]`` for each row."""
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
