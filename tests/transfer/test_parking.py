"""Requests whose entries are on their way are held back from the scheduler; real agents, a queue in place of vLLM's."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from mooncake_v0.handoff import HEADER, ID_BYTES, Handoff
from mooncake_v0.transfer.agent import TICK_S
from mooncake_v0.transfer.messages import MAX_KEYS
from mooncake_v0.vllm_plugin.early_decode import tell_ends
from mooncake_v0.vllm_plugin.parking import MAX_ASKED, ParkingLot
from tests.freezing import frozen
from tests.transfer.conftest import MIB, Agents, agent_pid, key, wait_until


@dataclass
class Group:
    """As vLLM's sequence group; ended: what `is_finished` says."""

    request_id: str
    number: int
    handoff: Handoff | None = None
    ended: bool = False

    @property
    def trace_headers(self) -> dict[str, str] | None:
        return None if self.handoff is None else {HEADER: self.handoff.header()}

    def is_finished(self) -> bool:
        return self.ended


@dataclass
class Scheduler:
    """What of vLLM's scheduler is used: three queues, and a call that takes everything that waits."""

    waiting: deque[Group] = field(default_factory=deque)
    running: deque[Group] = field(default_factory=deque)
    swapped: deque[Group] = field(default_factory=deque)

    def add_seq_group(self, group: Group) -> None:
        self.waiting.append(group)

    def free_finished_seq_groups(self) -> None:
        """Nothing is held for a group here."""

    def abort_seq_group(self, request_id: str) -> None:
        for group in [group for group in self.waiting if group.request_id == request_id]:
            self.waiting.remove(group)
            group.ended = True

    def schedule(self) -> list[str]:
        taken = [group.request_id for group in self.waiting]
        self.waiting = deque()
        return taken


def park(scheduler: Scheduler, agents: Agents, wait_s: float = 5.0) -> None:
    def key_of(group: Group) -> tuple[bytes, int] | None:
        return (key(group.number), 0) if group.number else None

    ParkingLot(scheduler, agents.decode, key_of=key_of, wait_s=wait_s)


def schedule(scheduler: Any) -> list[str]:
    taken: list[str] = scheduler.schedule()
    return taken


@pytest.fixture
def announced(shared_agents: Agents) -> int:
    """An entry that is announced and not here yet."""
    number = time.monotonic_ns() % (1 << 40)
    reserved = shared_agents.prefill.reserve([key(number)], [MIB])
    assert reserved.reasons == [""]
    return number


def test_request_waits_for_its_entry_and_others_overtake_it(shared_agents: Agents, announced: int) -> None:
    slow, other, last = Group("slow", announced), Group("other", 0), Group("last", 0)
    scheduler = Scheduler(deque([slow, other, last]))
    park(scheduler, shared_agents)

    assert schedule(scheduler) == ["other", "last"]
    assert list(scheduler.waiting) == [slow]

    shared_agents.prefill.commit([key(announced)], [MIB])
    wait_until(lambda: schedule(scheduler) == ["slow"])
    assert list(scheduler.waiting) == []


def test_unknown_request_is_let_through(shared_agents: Agents) -> None:
    scheduler = Scheduler(deque([Group("unknown", 123_456)]))
    park(scheduler, shared_agents)

    wait_until(lambda: schedule(scheduler) == ["unknown"])


def test_request_is_let_through_at_its_deadline(shared_agents: Agents, announced: int) -> None:
    scheduler = Scheduler(deque([Group("late", announced)]))
    park(scheduler, shared_agents, wait_s=0.2)
    started = time.monotonic()

    wait_until(lambda: schedule(scheduler) == ["late"])

    assert time.monotonic() - started >= 0.2


def test_a_queue_longer_than_any_message_is_asked_about_bit_by_bit(shared_agents: Agents) -> None:
    """None is known, so all are let through, those of the first question first."""
    groups = [Group(str(number), number) for number in range(200_000, 200_000 + MAX_KEYS + 10)]
    scheduler = Scheduler(deque(groups))
    park(scheduler, shared_agents, wait_s=60.0)
    agent = agent_pid(shared_agents.decode)
    taken: list[str] = []

    def some_are_taken() -> bool:
        taken.extend(schedule(scheduler))
        return len(taken) >= 20

    wait_until(some_are_taken)

    assert set(taken) <= {group.request_id for group in groups[: MAX_ASKED + len(taken)]}
    assert len(taken) + len(scheduler.waiting) == len(groups)
    assert agent_pid(shared_agents.decode) == agent and shared_agents.decode.running


def test_who_is_behind_a_long_queue_is_let_through_at_its_deadline(shared_agents: Agents, announced: int) -> None:
    living = [Handoff(os.urandom(ID_BYTES), within_s=60) for _ in range(MAX_ASKED)]
    groups = [Group(str(at), announced + 1 + at, handoff) for at, handoff in enumerate(living)]
    scheduler = Scheduler(deque([*groups, Group("behind", announced)]))
    park(scheduler, shared_agents, wait_s=0.2)
    assert schedule(scheduler) == []

    wait_until(lambda: schedule(scheduler) == ["behind"])

    assert len(scheduler.waiting) == MAX_ASKED


def test_held_requests_keep_their_order(shared_agents: Agents, announced: int) -> None:
    groups = [Group(f"r{index}", announced) for index in range(3)]
    scheduler = Scheduler(deque(groups))
    park(scheduler, shared_agents)

    assert schedule(scheduler) == []

    assert list(scheduler.waiting) == groups


def test_aborted_request_is_forgotten(shared_agents: Agents, announced: int) -> None:
    scheduler = Scheduler(deque([Group("gone", announced)]))
    park(scheduler, shared_agents)
    schedule(scheduler)

    scheduler.waiting.clear()

    assert schedule(scheduler) == []
    assert list(scheduler.waiting) == []


def test_idle_scheduler_waits_a_little_and_a_busy_one_does_not(shared_agents: Agents, announced: int) -> None:
    scheduler = Scheduler(deque([Group("slow", announced)]))
    park(scheduler, shared_agents, wait_s=60.0)

    def twenty_s() -> float:
        started = time.monotonic()
        for _ in range(20):
            assert schedule(scheduler) == []
        return time.monotonic() - started

    idle_s = twenty_s()
    scheduler.running.append(Group("busy", 0))
    busy_s = twenty_s()

    assert idle_s >= 20 * 0.004  # else the engine would spin
    assert idle_s < 20 * TICK_S / 2  # the agent answers when it was asked to, not when it looks around next
    assert busy_s < idle_s


def test_busy_scheduler_asks_the_agent_only_when_there_is_news(shared_agents: Agents, announced: int) -> None:
    scheduler = Scheduler(deque([Group("slow", announced)]), running=deque([Group("busy", 0)]))
    park(scheduler, shared_agents, wait_s=60.0)
    assert schedule(scheduler) == []
    before = shared_agents.decode._calls

    for _ in range(100):
        assert schedule(scheduler) == []

    assert shared_agents.decode._calls - before < 20  # the agent's own ticks count as news
    shared_agents.prefill.commit([key(announced)], [MIB])
    wait_until(lambda: schedule(scheduler) == ["slow"])


@dataclass
class Legs:
    """Both legs of one request, sent at the same time; decode's is on its scheduler, prefill's has not begun to compute."""

    agents: Agents
    prefill: Scheduler
    decode: Scheduler
    number: int = field(default_factory=lambda: time.monotonic_ns() % (1 << 40))
    handoff: Handoff = field(default_factory=lambda: Handoff(os.urandom(ID_BYTES), within_s=60))

    def send(self, wait_s: float = 0.2) -> Group:
        """Returns prefill's leg."""
        tell_ends(self.prefill, self.agents.prefill.end)
        park(self.decode, self.agents, wait_s)
        leg = Group("prefill", self.number, self.handoff)
        self.prefill.add_seq_group(leg)
        self.decode.add_seq_group(Group("decode", self.number, self.handoff))
        return leg

    def hold_for(self, seconds: float) -> None:
        """Whatever decode's patience is, nothing is let through so long."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            assert schedule(self.decode) == []

    def let_through(self) -> None:
        wait_until(lambda: schedule(self.decode) == ["decode"], "decode's leg is scheduled")


@pytest.fixture
def legs(shared_agents: Agents) -> Legs:
    return Legs(shared_agents, Scheduler(), Scheduler())


def test_early_request_waits_for_an_entry_that_nobody_has_announced_yet(legs: Legs) -> None:
    legs.send()
    legs.hold_for(0.5)

    assert legs.agents.prefill.reserve([key(legs.number)], [MIB]).reasons == [""]
    assert schedule(legs.decode) == []
    legs.agents.prefill.commit([key(legs.number)], [MIB])

    legs.let_through()
    assert legs.agents.fetch(legs.number, wait_s=0.0) != "late"


def test_early_request_waits_while_prefill_computes_what_it_has_announced(legs: Legs) -> None:
    legs.send(wait_s=0.5)
    assert legs.agents.prefill.reserve([key(legs.number)], [MIB]).reasons == [""]

    legs.hold_for(2.0)
    legs.agents.prefill.commit([key(legs.number)], [MIB])

    legs.let_through()
    assert legs.agents.fetch(legs.number, wait_s=0.0) != "late"


def test_early_request_computes_when_what_was_announced_is_not_here_soon_after_the_end(legs: Legs) -> None:
    leg = legs.send(wait_s=0.5)
    legs.agents.prefill.reserve([key(legs.number)], [MIB])
    legs.hold_for(1.0)

    leg.ended = True
    legs.prefill.free_finished_seq_groups()

    legs.let_through()
    legs.agents.prefill.commit([key(legs.number)], [MIB])  # for the tests that share these agents


def test_early_request_costs_the_step_in_which_it_was_added_nothing_more(legs: Legs) -> None:
    legs.decode.running.append(Group("running", 0))
    legs.send()
    before = legs.agents.decode._calls

    assert schedule(legs.decode) == []
    assert legs.agents.decode._calls == before

    assert schedule(legs.decode) == []
    assert legs.agents.decode._calls == before + 1
    legs.hold_for(0.3)
    legs.agents.prefill.end([legs.handoff.id])
    legs.let_through()


def test_early_request_computes_when_its_prefill_ends_without_an_entry(legs: Legs) -> None:
    leg = legs.send()
    legs.hold_for(0.5)

    leg.ended = True
    legs.prefill.free_finished_seq_groups()

    legs.let_through()


def test_early_request_computes_when_its_prefill_is_aborted(legs: Legs) -> None:
    legs.send()
    legs.hold_for(0.3)

    legs.prefill.abort_seq_group("prefill")

    legs.let_through()


def test_early_request_that_comes_after_the_end_of_its_prefill_computes_at_once(legs: Legs) -> None:
    legs.agents.prefill.end([legs.handoff.id])
    park(legs.decode, legs.agents)
    legs.decode.add_seq_group(Group("decode", legs.number, legs.handoff))

    legs.let_through()


def test_early_request_does_not_wait_longer_than_it_was_told(legs: Legs) -> None:
    legs.handoff = Handoff(os.urandom(ID_BYTES), within_s=1)
    legs.send()
    legs.hold_for(0.8)

    legs.let_through()


def test_early_request_that_has_no_room_computes_at_once(legs: Legs) -> None:
    legs.send()

    reserved = legs.agents.prefill.reserve([key(legs.number)], [1 << 40])

    assert reserved.reasons == ["too_large"]
    legs.hold_for(0.1)
    legs.prefill.waiting[0].ended = True
    legs.prefill.free_finished_seq_groups()
    legs.let_through()


def test_many_early_requests_whose_prefills_never_end_are_forgotten(shared_agents: Agents) -> None:
    for _ in range(12):
        polled = shared_agents.decode.poll([key(5)] * 1000, 0.0, [os.urandom(ID_BYTES) for _ in range(1000)])
        assert polled.awaited[-1]

    assert shared_agents.decode.running


def test_early_request_computes_when_the_peer_is_lost(agents: Agents) -> None:
    legs = Legs(agents, Scheduler(), Scheduler())
    legs.send(wait_s=60)
    legs.hold_for(0.3)

    agents.prefill.close()

    legs.let_through()


def test_a_frozen_agent_lets_everything_through(agents: Agents) -> None:
    agents.prefill.reserve([key(1)], [MIB])
    scheduler = Scheduler(deque([Group("slow", 1)]))
    park(scheduler, agents)
    with frozen(agent_pid(agents.decode)):
        assert schedule(scheduler) == ["slow"]
