"""Pairs of instances and what is known about their health. State only: no I/O, and the clock is passed in.

An instance is, as the probes see it:

    starting ──probe ok──► up ──refused──► down ──2 probes ok──► up
                            └─2 probes without an answer─► silent ──probe ok──► up

and apart from that it may be *ejected* (consecutive failed requests while its health endpoint is content) or *wedged*
(health is content, nothing comes out). An ejection ends by itself: then one request at a time is tried, one failure
ejects again for longer, two successes end the matter. Client errors, 429 and 503 and clients that leave never count.

A pair is a unit: both legs of a request go to the same pair, because a decode instance reads only its own prefill's KV.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Literal

from mooncake_v0.proxy.guard import INSTANCE_LOST, Guard
from mooncake_v0.proxy.settings import Health, Limits, PairSpec

Role = Literal["prefill", "decode"]
STARTING, UP, DOWN, SILENT = "starting", "up", "down", "silent"
HALF_OPEN_SUCCESSES = 2
LATENCIES_KEPT = 200


class Instance:
    """One vLLM server, in one role of one pair."""

    def __init__(self, role: Role, url: str, health: Health) -> None:
        self.role: Role = role
        self.url = url
        self.health = health
        self.state = STARTING
        self.wedged = False
        self.probe_failures = 0
        self.probe_successes = 0
        self.failures = 0
        self.successes = 0
        self.ejections = 0
        self.ejections_total = 0
        self.ejected_until_s = 0.0
        self.last_progress_s = time.monotonic()
        self.latencies_s: deque[float] = deque(maxlen=LATENCIES_KEPT)
        self.models: tuple[str, ...] = ()
        self.max_model_len = 0
        self.agents: tuple[str, str] | None = None  # epochs of its transfer agent and of that one's peer
        self.metrics_after_s = 0.0  # pause before these are read again
        # requests on this instance that can still go elsewhere: no byte of their answer has been sent
        self.movable: set[Guard] = set()
        self.inflight = 0

    # what the balancer asks

    def usable(self, now_s: float) -> bool:
        """Up, and neither ejected nor wedged; after an ejection one request at a time."""
        if self.state != UP or self.wedged or now_s < self.ejected_until_s:
            return False
        return self.inflight == 0 if self.half_open else True

    @property
    def half_open(self) -> bool:
        return self.ejections > 0

    @property
    def refuses(self) -> bool:
        """Nothing listens there, or it has not come up yet: a request would be lost at once."""
        return self.state in (DOWN, STARTING)

    def status(self, now_s: float) -> str:
        """One word for people and metrics."""
        if self.state != UP:
            return self.state
        if self.wedged:
            return "wedged"
        if now_s < self.ejected_until_s:
            return "ejected"
        return "recovering" if self.half_open else UP

    # what requests report

    def begin(self, guard: Guard) -> None:
        if self.inflight == 0:
            self.last_progress_s = time.monotonic()
        self.inflight += 1
        self.movable.add(guard)

    def committed(self, guard: Guard) -> None:
        """The client has got a byte: the request can no longer move."""
        self.movable.discard(guard)

    def end(self, guard: Guard) -> None:
        self.inflight -= 1
        self.movable.discard(guard)

    def progress(self, now_s: float) -> None:
        self.last_progress_s = now_s

    def succeeded(self, now_s: float, latency_s: float) -> None:
        self.last_progress_s = now_s
        self.latencies_s.append(latency_s)
        self.failures = 0
        self.wedged = False
        if self.ejections:
            self.successes += 1
            if self.successes >= HALF_OPEN_SUCCESSES:
                self.ejections = 0
                self.successes = 0

    def failed(self, now_s: float) -> None:
        """A request failed by this instance's fault."""
        self.failures += 1
        self.successes = 0
        threshold = 1 if self.half_open else self.health.eject_failures
        if self.failures >= threshold and now_s >= self.ejected_until_s:
            self.ejections += 1
            self.ejections_total += 1
            self.failures = 0
            pause_s = min(self.health.eject_s * self.ejections, self.health.eject_max_s)
            self.ejected_until_s = now_s + pause_s

    def refused(self) -> None:
        """A connection was refused: nothing listens. The next probes say when that changes."""
        self.state = DOWN
        self.agents = None
        self.probe_successes = 0

    # what probes report

    def probe_ok(self) -> bool:
        """Count a good probe; True when that made the instance up."""
        self.probe_failures = 0
        self.probe_successes += 1
        needed = 2 if self.state == DOWN else 1
        if self.state == UP or self.probe_successes < needed:
            return False
        if self.state == DOWN:
            # a new process: what its predecessor did is no evidence
            self.ejections = self.failures = self.successes = 0
            self.ejected_until_s = 0.0
            self.wedged = False
        self.state = UP
        return True

    def probe_failed(self, *, refused: bool) -> bool:
        """Count a bad probe; True when that changed the state from up."""
        was_up = self.state == UP
        self.probe_successes = 0
        self.probe_failures += 1
        self.agents = None
        if refused:
            self.state = STARTING if self.state == STARTING else DOWN
        elif self.probe_failures >= self.health.probe_failures and self.state == UP:
            self.state = SILENT
        return was_up and self.state != UP

    def release_movable(self) -> None:
        """Send requests that wait for this instance, and have answered nothing, to look elsewhere."""
        for guard in list(self.movable):
            guard.cut(INSTANCE_LOST)


class Pair:
    """A prefill and a decode instance, and the places in them."""

    def __init__(self, spec: PairSpec, limits: Limits, health: Health) -> None:
        self.spec = spec
        self.name = spec.name
        self.limits = limits
        self.prefill = Instance("prefill", spec.prefill_url, health)
        self.decode = Instance("decode", spec.decode_url, health)
        self.inflight = 0
        self.kv_tokens = 0
        self.draining = False
        self.differs = False  # the two instances name different models or context lengths
        self.prefill_places = asyncio.Semaphore(limits.pair_prefills)

    @property
    def instances(self) -> tuple[Instance, Instance]:
        return self.prefill, self.decode

    @property
    def hands_off_early(self) -> bool:
        """Whether decode may be sent a request before prefill has its KV: the two are each other's peers, and say so."""
        prefill, decode = self.prefill.agents, self.decode.agents
        return prefill is not None and decode is not None and prefill == (decode[1], decode[0])

    def has_place(self, prompt_tokens: int) -> bool:
        """Whether one more request fits; a prompt above the whole budget may come alone."""
        if self.inflight >= self.limits.pair_requests:
            return False
        budget = self.limits.pair_kv_tokens
        return budget == 0 or self.kv_tokens == 0 or self.kv_tokens + prompt_tokens <= budget
