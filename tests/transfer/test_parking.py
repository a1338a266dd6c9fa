"""Requests whose entries are on their way are held back from the scheduler; real agents, a queue in place of vLLM's."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from mooncake_v0.vllm_plugin.parking import ParkingLot
from tests.freezing import frozen
from tests.transfer.conftest import MIB, Agents, agent_pid, key, wait_until


@dataclass(frozen=True)
class Group:
    request_id: str
    number: int


@dataclass
class Scheduler:
    """What of vLLM's scheduler is used: three queues, and a call that takes everything that waits."""

    waiting: deque[Group] = field(default_factory=deque)
    running: deque[Group] = field(default_factory=deque)
    swapped: deque[Group] = field(default_factory=deque)

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


def test_idle_scheduler_does_not_spin_and_a_busy_one_does_not_wait(shared_agents: Agents, announced: int) -> None:
    scheduler = Scheduler(deque([Group("slow", announced)]))
    park(scheduler, shared_agents)
    schedule(scheduler)

    started = time.monotonic()
    for _ in range(20):
        schedule(scheduler)
    idle_s = time.monotonic() - started
    scheduler.running.append(Group("busy", 0))
    started = time.monotonic()
    for _ in range(20):
        schedule(scheduler)
    busy_s = time.monotonic() - started

    assert idle_s >= 20 * 0.004
    assert busy_s < idle_s


def test_a_frozen_agent_lets_everything_through(agents: Agents) -> None:
    agents.prefill.reserve([key(1)], [MIB])
    scheduler = Scheduler(deque([Group("slow", 1)]))
    park(scheduler, agents)
    with frozen(agent_pid(agents.decode)):
        assert schedule(scheduler) == ["slow"]
