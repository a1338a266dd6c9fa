"""Which pair serves a request, and the queue in front of them. No I/O.

The relay calls `acquire` before it sends anything and `release` when decode has ended. A place on decode is taken
before prefill is asked, so that no KV is made that nobody can take. Choice: pairs with both instances usable first,
then those with a usable decode, then (never leave out the last one on the strength of failed requests) any that does
not refuse connections; among equals the pair that saw this prompt last if it is not much busier, else the least busy.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Collection

from mooncake_v0.proxy.api_errors import ApiError, overloaded, unavailable
from mooncake_v0.proxy.pairs import Pair
from mooncake_v0.proxy.settings import Limits

PROMPTS_REMEMBERED = 20_000
AFFINITY_SLACK = 1.25  # a pair that holds the prompt's KV is taken while its load is below this multiple
AFFINITY_EXTRA = 2  # ... plus this many requests


@dataclass(frozen=True)
class Want:
    """What a request needs of a pair."""

    prompt_key: bytes
    prompt_tokens: int
    prefill: bool
    require_prefill: bool
    avoid: Collection[str] = ()


@dataclass
class Place:
    """A request's place on a pair; its KV counts against the pair's budget until decode has taken it."""

    pair: Pair
    kv_tokens: int


@dataclass(eq=False)
class Waiter:
    """A queued request."""

    want: Want
    future: asyncio.Future[Place]


class Balancer:
    """The pairs of this proxy and the requests that wait for a place."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pairs: dict[str, Pair] = {}
        self.queue: deque[Waiter] = deque()
        self._prompts: OrderedDict[bytes, str] = OrderedDict()
        self._turn = 0

    # the set of pairs

    def add(self, pair: Pair) -> None:
        self.pairs[pair.name] = pair
        self.wake()

    def remove(self, name: str) -> Pair | None:
        """Take a pair out; requests on it end as they would."""
        pair = self.pairs.pop(name, None)
        if pair is not None:
            pair.draining = True
        return pair

    @property
    def inflight(self) -> int:
        return sum(pair.inflight for pair in self.pairs.values())

    @property
    def max_model_len(self) -> int:
        """The smallest known context length of the decode instances, in tokens; 0 when none is known."""
        return min((pair.decode.max_model_len for pair in self.pairs.values() if pair.decode.max_model_len), default=0)

    @property
    def full(self) -> bool:
        """Whether a request would be turned away now, before anything of it is looked at."""
        return len(self.queue) >= self.limits.queue_requests

    # choosing

    def candidates(self, want: Want, now_s: float) -> list[Pair]:
        """The best tier of pairs for this request; empty when every decode refuses connections."""
        open_pairs = [pair for pair in self.pairs.values() if not pair.draining and pair.name not in want.avoid]
        decoding = [pair for pair in open_pairs if pair.decode.usable(now_s)]
        if want.prefill:
            both = [pair for pair in decoding if pair.prefill.usable(now_s)]
            if both:
                return both
            if want.require_prefill:
                return [p for p in open_pairs if not p.decode.refuses and not p.prefill.refuses]
        return decoding or [pair for pair in open_pairs if not pair.decode.refuses]

    def choose(self, want: Want, now_s: float) -> Pair | None:
        """The pair to use now; None when all candidates are full. Raises ApiError 503 when there are none."""
        candidates = self.candidates(want, now_s)
        if not candidates:
            raise unavailable("no pair of instances can serve this request now")
        free = [pair for pair in candidates if pair.has_place(want.prompt_tokens)]
        if not free:
            return None
        if len(free) == 1:
            return free[0]
        self._turn += 1
        # the turn breaks ties, so that idle pairs share the work
        turned = free[self._turn % len(free) :] + free[: self._turn % len(free)]
        least = min(turned, key=lambda pair: pair.inflight)
        known = self.pairs.get(self._prompts.get(want.prompt_key, ""))
        if known in free and known.inflight <= least.inflight * AFFINITY_SLACK + AFFINITY_EXTRA:
            return known
        return least

    def _take(self, pair: Pair, want: Want) -> Place:
        pair.inflight += 1
        pair.kv_tokens += want.prompt_tokens
        if want.prompt_key and len(self.pairs) > 1:
            self._prompts[want.prompt_key] = pair.name
            self._prompts.move_to_end(want.prompt_key)
            if len(self._prompts) > PROMPTS_REMEMBERED:
                self._prompts.popitem(last=False)
        return Place(pair, want.prompt_tokens)

    async def acquire(self, want: Want) -> Place:
        """Take a place on a pair, waiting in line for one if need be (the caller's guard bounds the wait).

        Raises ApiError: 503 when no pair can serve at all, 429 when the line is full.
        """
        pair = None if self.queue else self.choose(want, time.monotonic())
        if pair is not None:
            return self._take(pair, want)
        if self.full:
            raise overloaded("too many requests are waiting", retry_after_s=self.retry_after_s())
        waiter = Waiter(want, asyncio.get_running_loop().create_future())
        self.queue.append(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                # a place was given in the same moment as the request was cut
                self.release(waiter.future.result())
            raise
        finally:
            if waiter in self.queue:
                self.queue.remove(waiter)

    def release(self, place: Place) -> None:
        """Give a place back."""
        self.kv_taken(place)
        place.pair.inflight -= 1
        self.wake()

    def kv_taken(self, place: Place) -> None:
        """Decode has answered: the prompt's KV no longer waits anywhere. May be called more than once."""
        place.pair.kv_tokens -= place.kv_tokens
        place.kv_tokens = 0

    def wake(self) -> None:
        """Hand free places to those who wait, in order."""
        now_s = time.monotonic()
        while self.queue:
            waiter = self.queue[0]
            if waiter.future.done():
                self.queue.popleft()
                continue
            try:
                pair = self.choose(waiter.want, now_s)
            except ApiError as error:
                waiter.future.set_exception(error)
                self.queue.popleft()
                continue
            if pair is None:
                return
            waiter.future.set_result(self._take(pair, waiter.want))
            self.queue.popleft()

    def retry_after_s(self) -> int:
        """A guess at when a place is free: one second for each line's worth of places in front, at most ten."""
        places = max(1, sum(pair.limits.pair_requests for pair in self.pairs.values()))
        return min(10, 1 + len(self.queue) // places)
