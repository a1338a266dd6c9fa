"""A watch fed by a thread that reads a stream (etcd's gRPC watch, the gateway's /watch)."""

from __future__ import annotations

import queue
import threading
from typing import Callable, Union

from mooncake_v0.errors import StoreUnavailableError
from mooncake_v0.metadata.store import Change

Offer = Callable[[Change], None]


class QueueWatch:
    """Runs `read(offer)` in a daemon thread; what it returns is why the stream ended. `stop` must end the read."""

    def __init__(self, url: str, read: Callable[[Offer], str], stop: Callable[[], None]) -> None:
        self._url = url
        self._stop = stop
        self._found: queue.Queue[Union[Change, str]] = queue.Queue()
        threading.Thread(target=lambda: self._found.put(read(self._found.put)), name="watch", daemon=True).start()

    def next(self, timeout_s: float) -> Change | None:
        try:
            found = self._found.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if isinstance(found, Change):
            return found
        self._found.put(found)  # every later call says the same
        raise StoreUnavailableError(f"the watch on {self._url} was lost: {found}", fix="start the watch again")

    def close(self) -> None:
        self._stop()
