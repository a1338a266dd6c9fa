"""Who uses offsets in a worker's pools: the engine step, and copies that it began and that may end after it.

The agent's supervisor changes nothing under them: it waits until nobody uses a pool and keeps the next step out meanwhile,
but not for long, since a copy that never ends must not stop the engine.
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

_OPEN, _CLOSING, _ALONE = range(3)  # what the supervisor does: nothing, it waits for users, there are none


class InUse:
    """A count of users; `by_nobody` waits for none.

    closed_s: how long a newcomer waits for a supervisor that waits for others; after that nobody does for open_s
    """

    def __init__(self, closed_s: float = CLOSED_S, open_s: float = OPEN_S) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._state = _OPEN
        self._closed_s = closed_s
        self._open_s = open_s
        self._open_until_s = 0.0

    def enter(self) -> None:
        """Wait while the supervisor is at it, which takes milliseconds."""
        with self._changed:
            if self._state == _CLOSING and time.monotonic() >= self._open_until_s:
                self._wait_for_supervisor()
            self._changed.wait_for(lambda: self._state != _ALONE)
            self._users += 1

    def _wait_for_supervisor(self) -> None:
        if not self._changed.wait_for(lambda: self._state != _CLOSING, self._closed_s):
            self._open_until_s = time.monotonic() + self._open_s
            logger.warning("copies of KV have not ended for %g s; what waits for them goes on waiting", self._closed_s)

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
        self._set(_CLOSING)
        with self._changed:
            self._changed.wait_for(lambda: not self._users)
            self._state = _ALONE
            self._changed.notify_all()
        try:
            yield
        finally:
            self._set(_OPEN)

    def _set(self, state: int) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()
