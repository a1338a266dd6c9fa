"""Who uses offsets in a worker's pools: the engine step, and copies that it began and that may end after it.

The agent's supervisor changes nothing under them: it waits until nobody uses a pool and keeps newcomers out meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Iterator


class InUse:
    """A count of users; `by_nobody` waits for none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._closed = False

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
        with self._changed:
            self._closed = True
            while self._users:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
