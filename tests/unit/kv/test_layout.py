"""Gather and scatter on the cache shapes of every V0 backend (vllm 0.6.4.post1, get_kv_cache_shape)."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any, Callable, Sequence
from unittest import mock

import pytest
import torch

from mooncake_v0.errors import KVLayoutError
from mooncake_v0.kv.layout import KVLayout, find_block_dim

NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE, LAYERS = 12, 16, 2, 64, 3

BACKENDS: dict[str, tuple[Callable[[int], Sequence[int]], int]] = {
    "FlashAttention": (lambda n: (2, n, BLOCK_SIZE, HEADS, HEAD_SIZE), 1),
    "xformers": (lambda n: (2, n, BLOCK_SIZE * HEADS * HEAD_SIZE), 1),
    "FlashInfer": (lambda n: (n, 2, BLOCK_SIZE, HEADS, HEAD_SIZE), 0),
    "OpenVINO": (lambda n: (2, n, HEADS, BLOCK_SIZE, HEAD_SIZE), 1),
    "Pallas": (lambda n: (HEADS, n, BLOCK_SIZE, HEAD_SIZE), 1),
}
REAL = {
    "flash_attn": ("FlashAttentionBackend", "FlashAttention"),
    "flashinfer": ("FlashInferBackend", "FlashInfer"),
    "openvino": ("OpenVINOAttentionBackend", "OpenVINO"),
}
PAGED = {
    "xformers": "XFormersBackend",
    "torch_sdpa": "TorchSDPABackend",
    "rocm_flash_attn": "ROCmFlashAttentionBackend",
    "blocksparse_attn": "BlocksparseFlashAttentionBackend",
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8]


def real_shape_function(module: str, class_name: str) -> Callable[..., Sequence[int]]:
    """get_kv_cache_shape as the installed vLLM has it, taken out of its module: most need a GPU's kernels to import."""
    from vllm.attention.ops.paged_attn import PagedAttention

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "attention" / "backends" / f"{module}.py"
    (cls,) = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == class_name]
    (function,) = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "get_kv_cache_shape"]
    function.decorator_list = []
    names: dict[str, Any] = {"PagedAttention": PagedAttention, "Tuple": tuple}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    found: Callable[..., Sequence[int]] = names["get_kv_cache_shape"]
    return found


@pytest.mark.pin
@pytest.mark.parametrize("module", REAL)
def test_shapes_below_are_those_of_the_installed_vllm(module: str) -> None:
    class_name, backend = REAL[module]

    shape = real_shape_function(module, class_name)(NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)

    assert tuple(shape) == tuple(BACKENDS[backend][0](NUM_BLOCKS))


@pytest.mark.pin
@pytest.mark.parametrize("module", PAGED)
def test_backends_on_paged_attention_have_the_flat_shape(module: str) -> None:
    shape = real_shape_function(module, PAGED[module])(NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)

    assert tuple(shape) == tuple(BACKENDS["xformers"][0](NUM_BLOCKS))


ALL = {**{module: names[0] for module, names in REAL.items()}, **PAGED}
WITHOUT_KERNELS = ("torch_sdpa", "flashinfer")  # import on every machine


@pytest.mark.pin
@pytest.mark.parametrize("module", ALL)
def test_classes_that_can_be_imported_here_say_the_same_as_their_source(module: str) -> None:
    try:
        backend = getattr(importlib.import_module(f"vllm.attention.backends.{module}"), ALL[module])
    except (ImportError, RuntimeError) as error:  # no kernels, or no GPU
        assert module not in WITHOUT_KERNELS, error
        return
    arguments = (NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)

    assert tuple(backend.get_kv_cache_shape(*arguments)) == tuple(real_shape_function(module, ALL[module])(*arguments))


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_dimension_is_found(backend: str) -> None:
    get_shape, dim = BACKENDS[backend]

    assert find_block_dim(get_shape) == dim


def test_a_shape_without_a_block_dimension_is_refused() -> None:
    with pytest.raises(KVLayoutError, match="no single block dimension"):
        find_block_dim(lambda n: (n * BLOCK_SIZE, HEADS))


def make_caches(get_shape: Callable[[int], Sequence[int]], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(get_shape(NUM_BLOCKS))
    return [torch.randint(0, 256, shape, generator=generator).to(torch.uint8).to(dtype) for _ in range(LAYERS)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_arrive_where_the_other_side_wants_them(backend: str, dtype: torch.dtype) -> None:
    get_shape, dim = BACKENDS[backend]
    source, target = make_caches(get_shape, dtype, 1), make_caches(get_shape, dtype, 2)
    untouched = [cache.clone() for cache in target]
    src_ids, dst_ids = torch.tensor([7, 0, 11]), torch.tensor([2, 9, 4])
    out_layout, in_layout = KVLayout(source, dim), KVLayout(target, dim)
    entry = torch.zeros(out_layout.nbytes(3), dtype=torch.uint8)

    out_layout.gather(src_ids, out_layout.rows(entry, 3))
    in_layout.scatter(in_layout.rows(entry, 3), dst_ids)

    for before, after, origin in zip(untouched, target, source):
        assert torch.equal(after.index_select(dim, dst_ids), origin.index_select(dim, src_ids))
        others = torch.tensor([i for i in range(NUM_BLOCKS) if i not in dst_ids.tolist()])
        assert torch.equal(after.index_select(dim, others), before.index_select(dim, others))


def caches_at(starts: Sequence[int], row_bytes: int, seed: int) -> list[torch.Tensor]:
    """Caches of FlashAttention's shape that begin at these bytes of one allocation."""
    nbytes = 2 * NUM_BLOCKS * row_bytes
    memory = torch.randint(0, 256, (max(starts) + nbytes,), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )
    return [memory[start : start + nbytes].view(2, NUM_BLOCKS, BLOCK_SIZE, HEADS, -1) for start in starts]


APART = {  # starts, bytes of a block, whether one kernel can take all planes
    "whole blocks apart": ((5 << 16, 1 << 10, 3 << 16), 1024, True),
    "thirds of a block apart": ((5 << 16, 1 << 10, 3 << 16), 3072, True),
    "too little apart": ((5 << 16, 1 << 8, 3 << 16), 1024, False),
}


@pytest.mark.parametrize("one_kernel", [False, True], ids=["by plane", "one kernel"])
@pytest.mark.parametrize("apart", APART)
def test_planes_can_be_copied_some_at_a_time(apart: str, one_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, row_bytes, can = APART[apart]
    source, target = (caches_at(starts, row_bytes, seed) for seed in (1, 2))
    before = [cache.clone() for cache in target]
    layout, ids = KVLayout(source, 1, one_kernel=one_kernel), torch.tensor([7, 0, 11])
    rows = layout.rows(torch.zeros(layout.nbytes(3), dtype=torch.uint8), 3)
    select = mock.Mock(wraps=torch.index_select)
    monkeypatch.setattr(torch, "index_select", select)

    for start in range(0, len(rows), 2):
        layout.gather(ids, rows[start : start + 2], start)
        for plane, row in zip(layout.planes, rows[: start + 2]):
            assert torch.equal(plane[ids].view(torch.uint8), row.view(torch.uint8))
        assert not rows[start + 2 :].view(torch.uint8).any()
    for start in range(0, len(rows), 2):
        KVLayout(target, 1, one_kernel=one_kernel).scatter(rows[start : start + 2], ids, start)

    assert select.call_count == (3 if one_kernel and can else 6)
    others = torch.tensor([block for block in range(NUM_BLOCKS) if block not in ids])
    for one, other, old in zip(source, target, before):
        assert torch.equal(one[:, ids], other[:, ids])
        assert torch.equal(other[:, others], old[:, others])


def test_a_layer_is_known_by_the_address_of_its_cache() -> None:
    caches = make_caches(BACKENDS["FlashAttention"][0], torch.float16, 1)
    layout = KVLayout([caches[0], torch.empty(0), caches[1]], 1)

    assert layout.planes_through == {caches[0].data_ptr(): 2, caches[1].data_ptr(): 4}


@pytest.mark.parametrize(("head_size", "word"), [(64, torch.complex128), (1, torch.uint8)])
def test_rows_are_moved_in_the_widest_words_that_they_are_made_of(head_size: int, word: torch.dtype) -> None:
    assert (
        KVLayout([torch.zeros(2, 5, 16, 1, head_size, dtype=torch.uint8)[:, :, :3].contiguous()], 1).planes[0].dtype
        == word
    )


@pytest.mark.parametrize("one_kernel", [False, True], ids=["by plane", "one kernel"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_that_the_prefix_cache_holds_are_not_written(backend: str, one_kernel: bool) -> None:
    get_shape, dim = BACKENDS[backend]
    source, target = make_caches(get_shape, torch.float16, 1), make_caches(get_shape, torch.float16, 2)
    held = target[0].index_select(dim, torch.tensor([2])).clone()
    out_layout = KVLayout(source, dim)
    entry = torch.zeros(out_layout.nbytes(3), dtype=torch.uint8)
    rows = out_layout.rows(entry, 3)
    out_layout.gather(torch.tensor([7, 0, 11]), rows)

    KVLayout(target, dim, one_kernel=one_kernel).scatter(rows[:, 1:], torch.tensor([9, 4]))

    assert torch.equal(target[0].index_select(dim, torch.tensor([2])), held)
    wanted = source[0].index_select(dim, torch.tensor([0, 11]))
    assert torch.equal(target[0].index_select(dim, torch.tensor([9, 4])), wanted)


def test_an_entry_of_the_wrong_size_is_refused() -> None:
    layout = KVLayout(make_caches(BACKENDS["FlashInfer"][0], torch.float16, 1), 0)

    with pytest.raises(KVLayoutError, match="does not hold 2 blocks"):
        layout.rows(torch.zeros(layout.nbytes(3), dtype=torch.uint8), 2)


def test_layers_without_attention_are_skipped_and_unequal_layers_refused() -> None:
    caches = make_caches(BACKENDS["xformers"][0], torch.float16, 1)

    assert len(KVLayout([caches[0], torch.empty(0), caches[1]], 1).planes) == 4
    with pytest.raises(KVLayoutError, match="differ"):
        KVLayout([caches[0], caches[1][:, :5].contiguous()], 1)
