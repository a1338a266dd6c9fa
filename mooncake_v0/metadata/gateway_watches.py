"""Watches on the store, each handed on to any number of watching clients of a gateway.

There is one watch on the store per prefix, however many clients listen: the first one starts its reading thread, the
last one ends it. When the store's watch is lost the clients are told (their stream ends); they list and watch again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Callable, Union

from mooncake_v0.errors import MetadataError, MooncakeV0Error
from mooncake_v0.metadata.store import Change, MetadataStore

MAX_QUEUED_CHANGES = 10_000
MAX_PREFIXES = 64
TURN_S = 0.5

Queued = Union[Change, MooncakeV0Error]


class Subscription:
    """Changes under a prefix for one client; an error is the last item, when the watch has ended."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.queue: asyncio.Queue[Queued] = asyncio.Queue()

    def offer(self, item: Queued) -> None:
        waiting = self.queue.qsize()
        if waiting < MAX_QUEUED_CHANGES:
            self.queue.put_nowait(item)
        elif waiting == MAX_QUEUED_CHANGES:
            self.queue.put_nowait(MetadataError("this watch reads too slowly", fix="list again and start a new one"))


class _SharedWatch:
    """The store's watch on one prefix and its listeners."""

    def __init__(self, store: MetadataStore, prefix: str) -> None:
        self.listeners: set[Subscription] = set()
        self.stop = threading.Event()
        self._store = store
        self._prefix = prefix
        self._loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = self._loop.create_future()
        self.thread = threading.Thread(target=self._read, name="watch-hub", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        watch = None
        try:
            watch = self._store.watch(self._prefix)
            self._in_loop(self._has_begun)
            while not self.stop.is_set():
                change = watch.next(TURN_S)
                if change is not None:
                    self._in_loop(self._hand_out, change)
        except MooncakeV0Error as error:
            self._in_loop(self.end, error)
        finally:
            if watch is not None:
                watch.close()

    def _in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: the gateway ended while this thread waited
            self._loop.call_soon_threadsafe(call, *arguments)

    def _has_begun(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def _hand_out(self, change: Change) -> None:
        for listener in self.listeners:
            listener.offer(change)

    def end(self, error: MooncakeV0Error) -> None:
        """Tell the listeners that the watch is over, and why."""
        self.stop.set()
        if not self.begun.done():
            self.begun.set_exception(error)
        for listener in self.listeners:
            listener.offer(error)


class WatchHub:
    """Owned by one event loop."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._shared: dict[str, _SharedWatch] = {}

    async def subscribe(self, prefix: str) -> Subscription:
        """A subscription that sees every change from now on. Raises what the store's watch raises."""
        shared = self._shared.get(prefix)
        if shared is None or shared.stop.is_set():
            if len(self._shared) >= MAX_PREFIXES:
                raise MetadataError(f"{MAX_PREFIXES} prefixes are watched already", fix="watch a common prefix")
            shared = self._shared[prefix] = _SharedWatch(self._store, prefix)
        subscription = Subscription(prefix)
        shared.listeners.add(subscription)
        try:
            await asyncio.shield(shared.begun)
        except BaseException:
            self.unsubscribe(subscription)
            raise
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        shared = self._shared.get(subscription.prefix)
        if shared is None:
            return
        shared.listeners.discard(subscription)
        if not shared.listeners:
            shared.stop.set()
            del self._shared[subscription.prefix]

    async def close(self) -> None:
        """End every watch; its clients are told. The store may be closed afterwards."""
        ended = list(self._shared.values())
        self._shared.clear()
        for shared in ended:
            shared.end(MetadataError("the gateway stops", fix="watch again later"))
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, shared.thread.join, 2 * TURN_S) for shared in ended))
