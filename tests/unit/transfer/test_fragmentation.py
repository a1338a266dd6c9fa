"""The buffer does not fragment: after an hour's worth of entries of mixed sizes it holds as much as at the start."""

from __future__ import annotations

import random
from collections import deque
from typing import Iterator

import pytest

from mooncake_v0.transfer.lookup_buffer import LOST, Entry, LookupBuffer

GIB = 1 << 30
AN_HOUR = 36_000  # entries: ten prompts a second
WINDOW = AN_HOUR // 10
LIFE_S = 480.0
STEP_S = 0.1

# bytes of KV a token, the longest prompt in tokens, the buffer's limit in bytes
SHAPES = {
    "tiny model": (2048, 3000, 100_000_000),
    "8B model": (147_456, 8192, 16 * GIB),
    "8B model, buffer of three long prompts": (147_456, 8192, 4 * GIB),
}


def sizes(seed: int, bytes_a_token: int, longest: int) -> Iterator[int]:
    """Log-uniform prompt lengths in whole blocks of 16 tokens, each with a row of hidden states."""
    numbers = random.Random(seed)
    while True:
        blocks = -(-round(longest ** numbers.random()) // 16)
        yield blocks * 16 * bytes_a_token + 8192


def fills(buffer: LookupBuffer, entries: Iterator[int], seed: int) -> tuple[list[float], int]:
    """The share of the buffer in use after each entry, and how many found no space.

    As in an agent: an entry is pinned while it is written, read or copied, up to 20 at once; one in five is looked up
    again later, one in fifty is given up half way, and what is unused for LIFE_S expires.
    """
    numbers = random.Random(-seed)
    pinned: deque[Entry] = deque()
    seen: list[float] = []
    refused = 0
    for number in range(AN_HOUR):
        now_s = number * STEP_S
        made = buffer.insert(number.to_bytes(16, "big"), next(entries), now_s)
        if isinstance(made, Entry):
            pinned.append(made)
            if numbers.random() < 0.02:
                buffer.remove(made, LOST)
        else:
            refused += 1
        again = buffer.get(numbers.randrange(max(0, number - 200), number + 1).to_bytes(16, "big"))
        if again is not None and numbers.random() < 0.2:
            buffer.touch(again, now_s)
        while len(pinned) > numbers.randrange(1, 20):
            buffer.unpin(pinned.popleft())
        buffer.expire(now_s)
        buffer.take_dropped()
        seen.append(buffer.used_bytes / buffer.limit_bytes)
    while pinned:
        buffer.unpin(pinned.popleft())
    return seen, refused


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_hour_of_mixed_sizes_fills_the_buffer_as_at_the_start(shape: tuple[int, int, int]) -> None:
    """Mean and highest fill of each six minutes. About a fifth is free on average: an entry needs one piece, and what is
    evicted for it is the least recently used, wherever that is. That share does not grow."""
    bytes_a_token, longest, limit = shape
    buffer = LookupBuffer(limit, ttl_s=LIFE_S)

    seen, refused = fills(buffer, sizes(7, bytes_a_token, longest), seed=7)

    windows = [seen[start : start + WINDOW] for start in range(0, AN_HOUR, WINDOW)]
    means, highest = [sum(window) / WINDOW for window in windows], [max(window) for window in windows]
    assert min(means) > means[0] - 0.05, means
    assert min(highest) > highest[0] - 0.05, highest
    assert refused < AN_HOUR // 50
    for entry in buffer:
        buffer.remove(entry, LOST)
    buffer.clear_some(buffer.limit_bytes)
    assert buffer.used_bytes == 0
    assert isinstance(buffer.insert(b"whole".ljust(16), buffer.limit_bytes, 0.0), Entry)
