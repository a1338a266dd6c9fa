"""Deadlines without a timer for each step: one guard a request, one watchdog for all of them.

A request moves through steps (prefill, first byte, idle, client) and each has its own deadline, renewed with every
piece of a stream. Guards only write a number; the watchdog looks at all of them ten times a second and cancels the
task of one that is late. The same cut serves a client that has gone, an instance that was found dead, and the end of
a shutdown's patience. The cancelled task asks its guard why, and turns that into an error or goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

TICK_S = 0.1
NEVER = float("inf")

CLIENT_GONE = "client_gone"
CLIENT_STALLED = "client_stalled"
INSTANCE_LOST = "instance_lost"
SHUTDOWN = "shutdown"


class Cut(Exception):
    """The guarded step was ended from outside; cause is a step's name or one of the words above."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Guard:
    """The deadline of what one request's task is doing now."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.deadline = NEVER
        self.step = ""
        self.cause = ""

    def expect(self, step: str, seconds: float) -> None:
        """From now on the task is doing `step`, and may take `seconds` for it."""
        self.step = step
        self.deadline = time.monotonic() + seconds

    def rest(self) -> None:
        """The task is doing something that needs no deadline."""
        self.deadline = NEVER

    def cut(self, cause: str) -> None:
        """Cancel the task, once; the first cause stands."""
        if self.task is not None and not self.cause and not self.task.done():
            self.cause = cause
            self.task.cancel()

    def explain(self) -> Cut | None:
        """After CancelledError: why, if it was this guard; clears it, so that the task may do something else."""
        if not self.cause:
            return None
        cut = Cut(self.cause)
        self.cause = ""
        self.deadline = NEVER
        # Python 3.11 counts cancellations; timeouts further up must not see this one, which has been dealt with
        uncancel = getattr(self.task, "uncancel", None)
        if uncancel is not None:
            uncancel()
        return cut

    def close(self) -> None:
        """The request is over: nothing may cancel the task any more."""
        self.task = None


class Watchdog:
    """All guards in flight. `run` is a task of the app's life."""

    def __init__(self) -> None:
        self.guards: set[Guard] = set()

    def watch(self) -> Guard:
        guard = Guard()
        self.guards.add(guard)
        return guard

    def forget(self, guard: Guard) -> None:
        guard.close()
        self.guards.discard(guard)

    def sweep(self, now: float) -> None:
        """Cut every guard whose step is late."""
        for guard in [guard for guard in self.guards if guard.deadline < now]:
            guard.cut(guard.step)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.sweep(time.monotonic())
