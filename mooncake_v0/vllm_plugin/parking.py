"""Holds back requests whose KV is on its way, so that nothing waits for it inside the engine step.

On a consumer `Scheduler.schedule` is wrapped. Before each call, requests in the waiting queue whose entry is announced but
not here are taken out, and put back after it, in order: they are not scheduled, and everything that looks at the queue
(abort, counting unfinished requests) still finds them. So are requests that came together with their prefill leg, until
that has ended. A request is let through when its entry is here, when it is known not to come, or when its deadline has
passed. While requests run, they keep their pace: what comes meanwhile is filled into its blocks beside their steps and
joins them (`FillAhead`, where that can be). When there is nothing else to run, the call waits a few milliseconds for the
first entry, so that the engine's loop does not spin.

Needs the scheduler and the driver's agent in one process, as on GPUs and on a single CPU worker. With tensor parallel CPU
workers the driver is elsewhere, and the wait stays in the step, as long as `Consumer` allows.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable

from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.kv.connector import MIN_RATE_BYTES_PER_S
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.decode_side import MIN_PART_BYTES
from mooncake_v0.transfer.messages import Arriving
from mooncake_v0.vllm_plugin.early_decode import handoff_of
from mooncake_v0.vllm_plugin.fill_ahead import STEP_BYTES, FillAhead

IDLE_WAIT_S = 0.005
MAX_ASKED = 256  # requests in one question, as many as vLLM runs at once unless told otherwise (max_num_seqs)
SERVER_WAIT_S = 0.001  # where the engine's loop and the HTTP server are one thread


@dataclass
class Watched:
    """A waiting request.

    key:        of its entry
    patience_s: how long an entry may be on its way
    deadline_s: until when the request may be held back; later while its prefill leg lives
    handoff:    id of its handoff, or nothing
    until_s:    how long its prefill leg is believed to live
    settled:    whether it may be scheduled
    asked:      whether the agent was asked about it
    arrived:    whether its entry is here, and to be filled into its blocks before the request runs
    arriving:   what is here of its entry
    """

    key: bytes
    patience_s: float = 0.0
    deadline_s: float = 0.0
    handoff: bytes = b""
    until_s: float = 0.0
    settled: bool = False
    asked: bool = False
    arrived: bool = False
    arriving: Arriving | None = None


class ParkingLot:
    """Wraps one scheduler.

    key_of: a sequence group → (key, bytes of its entry), or None for a request that KV cannot serve
    wait_s: how long a request may be held back, beside the time that its bytes need at a slow rate
    idle_wait_s: how long one call may wait where nothing else is to be done
    ahead: fills blocks ahead; None where that cannot be
    """

    def __init__(
        self,
        scheduler: Any,
        client: AgentClient,
        *,
        key_of: Callable[[Any], tuple[bytes, int] | None],
        wait_s: float,
        idle_wait_s: float = IDLE_WAIT_S,
        ahead: FillAhead | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._client = client
        self._key_of = key_of
        self._wait_s = wait_s
        self._idle_wait_s = idle_wait_s
        self._ahead = ahead
        self._watched: dict[str, Watched | None] = {}
        self._news = -1
        original = scheduler.schedule
        scheduler.schedule = functools.wraps(original)(
            lambda *args, **kwargs: self._schedule(original, *args, **kwargs)
        )

    def _schedule(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scheduler = self._scheduler
        if not scheduler.waiting or self._client.has_no_peer:
            self._watched.clear()
            self._keep_blocks_of({})
            return original(*args, **kwargs)
        held = self._held_back()
        self._keep_blocks_of(held)
        if not held:
            return original(*args, **kwargs)
        scheduler.waiting = deque(group for group in scheduler.waiting if group.request_id not in held)
        try:
            scheduled = original(*args, **kwargs)
        finally:
            others_wait = bool(scheduler.waiting)
            scheduler.waiting.extendleft(reversed(list(held.values())))
        if self._ahead is not None:
            self._begin_filling(self._ahead, held, others_wait)
        return scheduled

    def _held_back(self) -> dict[str, Any]:
        """Requests not to be scheduled now, in the order of the queue."""
        groups = {group.request_id: group for group in self._scheduler.waiting}
        self._watched = {name: self._watched_or_new(name, group) for name, group in groups.items()}
        open_ones = {name: watched for name, watched in self._watched.items() if watched and not watched.settled}
        if open_ones:
            busy = len(open_ones) < len(groups) or self._scheduler.running or self._scheduler.swapped
            self._update(open_ones, 0.0 if busy else self._idle_wait_s)
            if self._ahead is not None:
                self._fill(self._ahead, open_ones, 0.0 if busy else self._idle_wait_s)
        return {name: groups[name] for name, watched in self._watched.items() if watched is None or not watched.settled}

    # --- filling ahead ------------------------------------------------------------------------------------------------

    def _fill(self, ahead: FillAhead, open_ones: dict[str, Watched], wait_s: float) -> None:
        """Copy on what has come, and let those run whose copies have ended."""
        for name in ahead.names:
            filling, watched = ahead.get(name), open_ones.get(name)
            if filling is None or watched is None or filling.has_all:
                continue
            if watched.arriving is not None:
                filling.follow(watched.arriving)
            if watched.arrived and not filling.take_all():
                watched.settled = True
        ahead.start_step()
        ahead.advance()
        last = [filling for name in ahead.names if (filling := ahead.get(name)) is not None and filling.has_all]
        if wait_s and last:
            last[0].wait(wait_s)
        for name in ahead.join_ended():
            open_ones[name].settled = True

    def _begin_filling(self, ahead: FillAhead, held: dict[str, Any], others_wait: bool) -> None:
        """Give blocks to requests whose KV is here, or enough of it: in their order, and after others that want blocks."""
        for name, group in held.items():
            watched = self._watched[name]
            if watched is None or watched.settled or ahead.get(name) is not None:
                continue
            if not watched.arrived and not self._is_worth_it(watched.arriving):
                continue
            others_wait = others_wait or not ahead.begin(group, watched.key, has_all=watched.arrived)
            watched.settled = watched.arrived and ahead.get(name) is None
        ahead.advance()

    def _is_worth_it(self, arriving: Arriving | None) -> bool:
        """Whether to copy while the rest arrives. Where nothing runs, the step to be joined costs more than a small copy."""
        if arriving is None or arriving.nbytes - arriving.ready_nbytes < MIN_PART_BYTES:
            return False
        return bool(self._scheduler.running) or arriving.nbytes >= STEP_BYTES

    def _keep_blocks_of(self, held: dict[str, Any]) -> None:
        """Whatever else is let through gets its blocks from vLLM itself."""
        if self._ahead is not None:
            for name in self._ahead.names:
                if name not in held:
                    self._ahead.give_up(name)

    # --- what the agent knows -----------------------------------------------------------------------------------------

    def _watched_or_new(self, name: str, group: Any) -> Watched | None:
        """None: a leg that came with prefill's, just now. To add it has made this step long, and its key can wait."""
        watched = self._watched.get(name)
        if watched is not None:
            return watched
        if self._scheduler.running and name not in self._watched and handoff_of(group) is not None:
            return None
        return self._watch(group)

    def _watch(self, group: Any) -> Watched:
        found = self._key_of(group)
        if found is None:
            return Watched(b"", settled=True)
        key, nbytes = found
        now_s, patience_s, handoff = time.monotonic(), self._wait_s + nbytes / MIN_RATE_BYTES_PER_S, handoff_of(group)
        watched = Watched(key, patience_s, now_s + patience_s)
        if handoff is not None:
            watched.handoff, watched.until_s = handoff.id, now_s + handoff.within_s
        return watched

    def _update(self, open_ones: dict[str, Watched], wait_s: float) -> None:
        """Ask the agent which entries are settled; without an agent nothing is worth waiting for.

        A step that does not wait asks only when there is news: an answer costs a tenth of a millisecond. Those behind the
        first MAX_ASKED wait for their turn.
        """
        now_s, news = time.monotonic(), self._client.pool.news
        unknown = {name: row for name, row in open_ones.items() if not row.arrived}
        names, rows = list(unknown)[:MAX_ASKED], list(unknown.values())[:MAX_ASKED]
        for row in list(unknown.values())[MAX_ASKED:]:
            row.settled = now_s >= max(row.deadline_s, row.until_s)
        if not rows:
            return
        if not wait_s and news == self._news and self._client.running and not any(_is_due(row, now_s) for row in rows):
            return
        self._news = news  # as it was before the question
        handoffs = [row.handoff if now_s < row.until_s else b"" for row in rows]
        try:
            polled = self._client.poll([row.key for row in rows], wait_s, handoffs)
        except AgentUnavailableError:
            for row in rows:
                row.settled = True
            return
        now_s = time.monotonic()
        for name, row, is_settled, is_awaited, arriving in zip(
            names, rows, polled.settled, polled.awaited, polled.arriving
        ):
            if is_awaited:
                row.deadline_s = now_s + row.patience_s
            row.asked, row.arriving = True, arriving
            row.arrived = is_settled and self._is_to_be_filled(name)
            row.settled = not row.arrived and (is_settled or now_s >= row.deadline_s)

    def _is_to_be_filled(self, name: str) -> bool:
        """A settled request, while others run or some of it is in its blocks already."""
        return self._ahead is not None and (bool(self._scheduler.running) or self._ahead.get(name) is not None)


def _is_due(row: Watched, now_s: float) -> bool:
    return not row.asked or now_s >= row.deadline_s or bool(row.handoff and now_s >= row.until_s)
