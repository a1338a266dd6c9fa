"""Who uses offsets in a worker's pools: the engine step, and copies that it began and that may end after it.

The agent's supervisor changes nothing under them: it waits until nobody uses a pool and keeps newcomers out meanwhile. It
does so for a second at most and then lets them in again, since a copy that never ends must not stop the engine.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Iterator

logger = logging.getLogger(__name__)

CLOSED_S = 1.0
OPEN_S = 10.0


class InUse:
    """A count of users; `by_nobody` waits for none. closed_s, open_s: newcomers are kept out, and let in, so long in turn."""

    def __init__(self, closed_s: float = CLOSED_S, open_s: float = OPEN_S) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._closed = False
        self._closed_s = closed_s
        self._open_s = open_s

    def enter(self) -> None:
        """Wait while the supervisor is at it, which takes milliseconds."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._users += 1

    def enter_again(self) -> None:
        """Of one who has entered, for what goes on after he has left: never waits, also not for one who waits for him."""
        with self._changed:
            self._users += 1

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def by_nobody(self) -> Iterator[None]:
        """Used by nobody while held. One thread at a time, the supervisor's."""
        self._wait_for_nobody()
        try:
            yield
        finally:
            self._set_closed(False)

    def _wait_for_nobody(self) -> None:
        while True:
            self._set_closed(True)
            if self._wait_until_unused(self._closed_s):
                return
            self._set_closed(False)
            logger.warning(
                "copies of KV have not ended for %g s; what waits for them is tried again later", self._closed_s
            )
            time.sleep(self._open_s)

    def _set_closed(self, closed: bool) -> None:
        with self._changed:
            self._closed = closed
            self._changed.notify_all()

    def _wait_until_unused(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._users, timeout_s)
