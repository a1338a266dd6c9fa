from __future__ import annotations

from mooncake_v0.transfer.lookup_buffer import EVICTED, EXPIRED, FULL, HELD, LOST, TOO_LARGE, Entry, LookupBuffer
from mooncake_v0.transfer.pool import ALIGNMENT_BYTES

PAGE = ALIGNMENT_BYTES


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def held(buffer: LookupBuffer, number: int, pages: int = 1, now_s: float = 0.0) -> Entry:
    """An entry that is complete and not in use."""
    entry = buffer.insert(key(number), pages * PAGE, now_s)
    assert isinstance(entry, Entry)
    entry.state = HELD
    buffer.unpin(entry)
    return entry


def test_look_up_removes_nothing() -> None:
    buffer = LookupBuffer(4 * PAGE, ttl_s=10)
    entry = held(buffer, 1)

    assert buffer.get(key(1)) is entry
    assert buffer.get(key(1)) is entry
    assert buffer.get(key(2)) is None


def test_entry_larger_than_the_buffer_is_refused() -> None:
    buffer = LookupBuffer(4 * PAGE, ttl_s=10)

    assert buffer.insert(key(1), 4 * PAGE + 1, 0.0) == TOO_LARGE
    assert buffer.counters["refused_too_large"] == 1
    assert len(buffer) == 0


def test_full_buffer_evicts_the_least_recently_used() -> None:
    buffer = LookupBuffer(3 * PAGE, ttl_s=10)
    first, second, third = (held(buffer, number) for number in (1, 2, 3))
    buffer.touch(first, 1.0)

    held(buffer, 4, pages=2)

    assert [buffer.get(key(number)) is not None for number in (1, 2, 3, 4)] == [True, False, False, True]
    assert buffer.counters[EVICTED] == 2
    assert buffer.take_dropped() == [second.key, third.key]
    assert buffer.used_bytes == buffer.limit_bytes


def test_pinned_entries_are_never_evicted() -> None:
    buffer = LookupBuffer(2 * PAGE, ttl_s=10)
    buffer.pin(held(buffer, 1))
    buffer.pin(held(buffer, 2))

    assert buffer.insert(key(3), PAGE, 0.0) == FULL
    assert buffer.counters["refused_full"] == 1


def test_bytes_of_a_removed_entry_are_freed_with_its_last_pin() -> None:
    buffer = LookupBuffer(PAGE, ttl_s=10)
    entry = held(buffer, 1)
    buffer.pin(entry)

    buffer.remove(entry, LOST)
    assert buffer.insert(key(2), PAGE, 0.0) == FULL

    buffer.unpin(entry)
    assert isinstance(buffer.insert(key(2), PAGE, 0.0), Entry)


def test_entries_expire_by_age_since_their_last_use() -> None:
    buffer = LookupBuffer(4 * PAGE, ttl_s=10)
    old, used = held(buffer, 1, now_s=0.0), held(buffer, 2, now_s=0.0)
    buffer.touch(used, 5.0)

    buffer.expire(11.0)

    assert buffer.get(old.key) is None
    assert buffer.get(used.key) is used
    assert buffer.counters[EXPIRED] == 1


def test_bytes_of_expired_and_lost_entries_are_cleared_before_they_are_free() -> None:
    said: list[tuple[str, int]] = []
    buffer = LookupBuffer(
        4 * PAGE,
        ttl_s=10,
        on_free=lambda entry: said.append(("may change", entry.offset)),
        clear=lambda offset, nbytes: said.append(("cleared", offset)),
    )
    old, lost = held(buffer, 1, now_s=0.0), held(buffer, 2, now_s=20.0)
    buffer.expire(11.0)
    buffer.remove(lost, LOST)
    assert (said, buffer.used_bytes) == ([], 2 * PAGE)

    assert buffer.clear_some(PAGE)
    assert (said[:2], buffer.used_bytes) == ([("may change", old.offset), ("cleared", old.offset)], PAGE)
    assert buffer.clear_some(PAGE) and not buffer.clear_some(PAGE)
    assert ("cleared", lost.offset) in said
    assert buffer.used_bytes == 0


def test_clearing_takes_no_more_at_once_than_it_is_told() -> None:
    cleared: list[tuple[int, int]] = []
    buffer = LookupBuffer(4 * PAGE, ttl_s=10, clear=lambda offset, nbytes: cleared.append((offset, nbytes)))
    first, second = held(buffer, 1, pages=3), held(buffer, 2)
    for entry in (first, second):
        buffer.remove(entry, LOST)

    used = [buffer.used_bytes // PAGE for _ in range(3) if buffer.clear_some(2 * PAGE)]

    assert cleared == [(first.offset, 2 * PAGE), (first.offset + 2 * PAGE, PAGE), (second.offset, PAGE)]
    assert used == [4, 0]


def test_a_pinned_entry_is_cleared_after_its_last_pin() -> None:
    cleared: list[int] = []
    buffer = LookupBuffer(PAGE, ttl_s=10, clear=lambda offset, nbytes: cleared.append(offset))
    entry = held(buffer, 1)
    buffer.pin(entry)
    buffer.remove(entry, LOST)

    assert not buffer.clear_some(PAGE)

    buffer.unpin(entry)
    assert buffer.clear_some(PAGE) and cleared == [0]


def test_space_that_waits_to_be_cleared_is_cleared_for_a_new_entry() -> None:
    cleared: list[int] = []
    buffer = LookupBuffer(2 * PAGE, ttl_s=10, clear=lambda offset, nbytes: cleared.append(offset))
    buffer.remove(held(buffer, 1, pages=2), LOST)

    held(buffer, 2, pages=2)

    assert cleared == [0]


def test_an_evicted_entry_is_reused_without_clearing() -> None:
    cleared: list[int] = []
    buffer = LookupBuffer(PAGE, ttl_s=10, clear=lambda offset, nbytes: cleared.append(offset))
    held(buffer, 1)

    held(buffer, 2)

    assert cleared == []


def test_generations_tell_a_reused_region_apart() -> None:
    buffer = LookupBuffer(PAGE, ttl_s=10)
    first = held(buffer, 1)
    held(buffer, 2)

    again = held(buffer, 1)

    assert again.offset == first.offset
    assert again.generation != first.generation
