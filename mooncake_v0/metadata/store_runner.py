"""Runs a synchronous store for the gateway's event loop, and decides when the store counts as down.

A call runs in a thread (the memory store: at once) and ends within the store's own deadline, so a slow or stopped store
blocks neither the loop nor calls for other keys while threads are free. States:

    up    → down  after FAILURES_TO_DOWN calls in a row without an answer: one log line, every call fails at once
    down  → up    when the runner's own probe, every PROBE_INTERVAL_S, is answered: one log line

With `stale_reads`, a get that the store cannot answer is answered from what passed through here earlier.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, TypeVar

from mooncake_v0.errors import StoreUnavailableError
from mooncake_v0.metadata.memory_store import MemoryStore
from mooncake_v0.metadata.sqlite_store import SqliteStore
from mooncake_v0.metadata.store import MetadataStore

logger = logging.getLogger(__name__)

MAX_THREADS = 32
MAX_WAITING = 2000
FAILURES_TO_DOWN = 2
PROBE_INTERVAL_S = 0.5
PROBE_KEY = "mooncake-v0/probe/up"
MAX_CACHED_KEYS = 20_000
MAX_CACHED_BYTES = 64 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """The answer to a get; stale_s is None, or the seconds since the cached value was known to be true."""

    value: bytes | None
    stale_s: float | None = None


class StoreRunner:
    """Used by one event loop only."""

    def __init__(self, store: MetadataStore, *, stale_reads: bool = False) -> None:
        self.store = store
        self.is_up = True
        self.failures = 0
        self.is_inline = isinstance(store, MemoryStore)
        # a sqlite file that is locked for writers still answers readers
        self._can_be_down = not isinstance(store, SqliteStore)
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="store")
        self._waiting = 0
        self._in_a_row = 0
        self._last_error: StoreUnavailableError | None = None
        self._probe: asyncio.Task[None] | None = None
        self._cached_bytes = 0
        self._cache: OrderedDict[str, tuple[bytes, float]] | None = OrderedDict() if stale_reads else None

    async def get(self, key: str) -> Found:
        try:
            value = await self._run(lambda: self.store.get(key))
        except StoreUnavailableError:
            cached = None if self._cache is None else self._cache.get(key)
            if cached is None:
                raise
            return Found(cached[0], time.monotonic() - cached[1])
        self._remember(key, value)
        return Found(value)

    async def put(self, key: str, value: bytes, ttl_s: float | None) -> None:
        await self._run(lambda: self.store.put(key, value, ttl_s=ttl_s))
        self._remember(key, value)

    async def delete(self, key: str, expected: bytes | None = None) -> bool:
        was_there = await self._run(lambda: self.store.delete(key, expected=expected))
        self._remember(key, None)
        return was_there

    async def run(self, call: Callable[[], T]) -> T:
        """Any other use of the store."""
        return await self._run(call)

    async def close(self) -> None:
        """Stop probing and close the store."""
        if self._probe is not None:
            self._probe.cancel()
        self._threads.shutdown(wait=False)
        self.store.close()

    async def _run(self, call: Callable[[], T]) -> T:
        if self.is_inline:
            return call()
        if not self.is_up and self._last_error is not None:
            raise self._last_error
        if self._waiting >= MAX_WAITING:
            raise StoreUnavailableError(f"{MAX_WAITING} requests wait for {self.store.url}", fix="see why it is slow")
        return await self._in_thread(call)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        self._waiting += 1
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._unless_down(call))
        except StoreUnavailableError as error:
            self._failed(error)
            raise
        finally:
            self._waiting -= 1
        self._in_a_row = 0
        return answer

    def _unless_down(self, call: Callable[[], T]) -> Callable[[], T]:
        def checked() -> T:
            # it may have gone down while this call waited for a thread
            if not self.is_up and self._last_error is not None:
                raise self._last_error
            return call()

        return checked

    def _failed(self, error: StoreUnavailableError) -> None:
        self.failures += 1
        self._in_a_row += 1
        self._last_error = error
        if self._can_be_down and self.is_up and self._in_a_row >= FAILURES_TO_DOWN:
            self.is_up = False
            logger.error("metadata store is down: %s", error.what)
            self._probe = asyncio.get_running_loop().create_task(self._wait_until_up())

    async def _wait_until_up(self) -> None:
        since = time.monotonic()
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, self.store.get, PROBE_KEY)
            except StoreUnavailableError as error:
                self._last_error = error
                continue
            self.is_up, self._in_a_row = True, 0
            logger.warning("metadata store answers again after %.1f s", time.monotonic() - since)
            return

    def _remember(self, key: str, value: bytes | None) -> None:
        if self._cache is None:
            return
        known = self._cache.pop(key, None)
        self._cached_bytes -= 0 if known is None else len(known[0])
        if value is None:
            return
        self._cache[key] = (value, time.monotonic())
        self._cached_bytes += len(value)
        while self._cached_bytes > MAX_CACHED_BYTES or len(self._cache) > MAX_CACHED_KEYS:
            _, (oldest, _) = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest)
