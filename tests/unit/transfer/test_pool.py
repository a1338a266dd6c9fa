from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_v0.errors import TransferError
from mooncake_v0.transfer.pool import ALIGNMENT_BYTES, Allocator, Pool, _container_available

PAGE = ALIGNMENT_BYTES


def test_pool_is_shared_memory_of_whole_pages() -> None:
    pool = Pool.create(3 * PAGE - 1)

    pool.allocate_pages()
    pool.map_pages()
    second = Pool(pool.fd, pool.nbytes)
    second.map[5000] = 7

    assert pool.nbytes == 2 * PAGE
    assert pool.map[5000] == 7
    assert pool.address % PAGE == 0


def test_pool_larger_than_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(TransferError, match=r"kv_buffer_size 1125899906842624 bytes does not fit: .* \d+ bytes"):
        Pool.create(1 << 50)


@pytest.mark.parametrize(
    ("limit_file", "used_file"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_limit_of_a_container_is_known(tmp_path: Path, limit_file: str, used_file: str) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit_file).write_text("1000000\n")
    (tmp_path / used_file).write_text("400000\n")

    assert _container_available(tmp_path) == 600_000


def test_container_without_a_limit_has_none(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400000\n")

    assert _container_available(tmp_path) is None


def test_allocator_gives_back_the_smallest_extent_that_fits() -> None:
    allocator = Allocator(10 * PAGE)
    first, hole, last = (allocator.allocate(size * PAGE) for size in (3, 2, 5))
    assert (first, hole, last) == (0, 3 * PAGE, 5 * PAGE)
    assert allocator.allocate(1) is None

    allocator.free(0)
    allocator.free(3 * PAGE)

    assert allocator.allocate(5 * PAGE) == 0


def test_allocator_rounds_up_to_pages_and_counts_what_is_used() -> None:
    allocator = Allocator(2 * PAGE)

    allocator.allocate(1)

    assert allocator.used_bytes == PAGE
    assert allocator.allocate(PAGE + 1) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * PAGE)), max_size=200))
@settings(deadline=None)
def test_allocations_never_overlap_and_everything_comes_back(steps: list[tuple[bool, int]]) -> None:
    allocator = Allocator(64 * PAGE)
    held: dict[int, int] = {}
    for is_free, nbytes in steps:
        if is_free and held:
            offset = random.Random(nbytes).choice(sorted(held))
            allocator.free(offset)
            del held[offset]
        else:
            offset_or_none = allocator.allocate(nbytes)
            if offset_or_none is not None:
                held[offset_or_none] = Allocator.rounded(nbytes)
        spans = sorted((offset, offset + size) for offset, size in held.items())
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
        assert allocator.used_bytes == sum(held.values()) <= 64 * PAGE

    for offset in list(held):
        allocator.free(offset)

    assert allocator.allocate(64 * PAGE) == 0
