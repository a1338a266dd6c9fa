"""Strikes and repairs, in an order drawn from the seed, and does what an operator's supervisor would: restarts the dead."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Callable

from tests.soak.chaos.faults import Faults, Repair, Struck
from tests.soak.chaos.soak_pair import INSTANCES, SoakPair, restart

LOOK_EVERY_S = 0.2
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 7.0
SUPERVISOR_PAUSE_S = 3.0  # until a dead process is started again, at most
UNHEALTHY_S = 20.0  # an instance that does not answer for so long is restarted, as a liveness probe does
PROXY_NOTICES_S = 15.0  # after decode serves again or goes on: the proxy's probes, and answers on broken connections
SETTLE_INSTANCE_S = 60.0  # both instances have served for so long before one of them is killed again
START_TIMEOUT_S = 300.0

Say = Callable[[str], None]


@dataclass
class Outage:
    """A time in which requests may fail, because the only decode instance is gone. Monotonic seconds."""

    started_s: float
    ended_s: float | None = None

    def touches(self, started_s: float, ended_s: float) -> bool:
        return self.started_s <= ended_s and (self.ended_s is None or started_s <= self.ended_s)


class Supervisor:
    """Restarts what has died or does not answer; knows since when each instance serves (None: it does not)."""

    def __init__(self, pair: SoakPair, say: Say, numbers: random.Random) -> None:
        self._pair, self._say, self._numbers = pair, say, numbers
        now_s = time.monotonic()
        self.serving_since_s: dict[str, float | None] = dict.fromkeys(INSTANCES, now_s)
        self.restarts: Counter[str] = Counter()
        self._answered_at_s = dict.fromkeys(INSTANCES, now_s)
        self._restart_at_s: dict[str, float] = {}

    def look(self) -> None:
        now_s = time.monotonic()
        for name in ("metadata", *INSTANCES):
            if name in self._restart_at_s:
                if now_s >= self._restart_at_s[name]:
                    self._restart(name)
            elif self._pair.processes[name].popen.poll() is not None:
                self._is_dead(name, "has ended")
        for role in INSTANCES:
            self._probe(role)

    def _probe(self, role: str) -> None:
        if role in self._restart_at_s:
            return
        if self._pair.processes[role].is_ready():
            self._answered_at_s[role] = time.monotonic()
            if self.serving_since_s[role] is None:
                self.serving_since_s[role] = time.monotonic()
                self._say(f"{role} serves again")
            return
        patience_s = UNHEALTHY_S if self.serving_since_s[role] is not None else START_TIMEOUT_S
        if time.monotonic() - self._answered_at_s[role] > patience_s:
            self._is_dead(role, f"does not answer for {patience_s:.0f} s")

    def _is_dead(self, name: str, why: str) -> None:
        pause_s = self._numbers.random() * SUPERVISOR_PAUSE_S
        self._say(f"{name} {why}; it is started again in {pause_s:.1f} s")
        self._restart_at_s[name] = time.monotonic() + pause_s
        if name in INSTANCES:
            self.serving_since_s[name] = None

    def _restart(self, name: str) -> None:
        del self._restart_at_s[name]
        restart(self._pair, name)
        self.restarts[name] += 1
        if name in INSTANCES:
            self._answered_at_s[name] = time.monotonic()

    def all_serve(self, for_s: float = 0.0) -> bool:
        since = self.serving_since_s.values()
        return not self._restart_at_s and all(s is not None and time.monotonic() - s >= for_s for s in since)


def _kills_instance(name: str) -> bool:
    return name.startswith(("kill_prefill", "kill_decode", "kill_engine"))


class Chaos:
    """`run` for a while, then `repair_all`. instance_kills: at most so many kills of instances or their engines."""

    def __init__(self, pair: SoakPair, say: Say, seed: int, instance_kills: int) -> None:
        numbers = random.Random(f"chaos-{seed}")
        self.struck: Counter[str] = Counter()
        self.outages: list[Outage] = []
        self.supervisor = Supervisor(pair, say, numbers)
        self._say, self._numbers = say, numbers
        self._faults = Faults(pair, numbers)
        self._has_link = pair.link is not None
        self._bag: deque[tuple[str, Callable[[], Struck]]] = deque()
        self._repairs: list[tuple[float, str, Repair]] = []
        self._decode_was_serving = True
        self._kills_left, self._has_killed = instance_kills, False

    def run(self, seconds: float, each_look: Callable[[], None]) -> None:
        """Faults for so long; each_look is called in between."""
        end_s = time.monotonic() + seconds
        next_s = time.monotonic()
        while time.monotonic() < end_s:
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + self._numbers.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
                self._strike()
            self._look()
            each_look()
            time.sleep(LOOK_EVERY_S)

    def repair_all(self, each_look: Callable[[], None], timeout_s: float = START_TIMEOUT_S) -> bool:
        """End every fault and wait until both instances serve; False when they do not."""
        self._repair_due(float("inf"))
        deadline_s = time.monotonic() + timeout_s
        while not self.supervisor.all_serve():
            if time.monotonic() > deadline_s:
                return False
            self._look()
            each_look()
            time.sleep(LOOK_EVERY_S)
        return True

    def excuses(self, started_s: float, ended_s: float) -> bool:
        """Whether a request of that time may have failed."""
        return any(outage.touches(started_s, ended_s) for outage in self.outages)

    def _look(self) -> None:
        self._repair_due(time.monotonic())
        self.supervisor.look()
        serving = self.supervisor.serving_since_s["decode"] is not None
        if serving != self._decode_was_serving:
            self._decode_was_serving = serving
            if serving:
                self._end_outages()
            else:
                self._begin_outage()

    def _strike(self) -> None:
        """The next fault of the bag, which has every kind once; a kill of an instance waits until there is one to kill."""
        if not self._bag:
            kinds = list(self._kinds().items())
            self._numbers.shuffle(kinds)
            if self._kills_left < len(kinds):  # few kills come first, so that the instance is back before the end
                kinds.sort(key=lambda kind: not _kills_instance(kind[0]))
            self._bag.extend(kinds)
        name, begin = self._bag.popleft()
        if _kills_instance(name):
            if self._kills_left <= 0:
                return self._strike()
            settle_s = SETTLE_INSTANCE_S if self._has_killed else 0.0
            if not self.supervisor.all_serve(for_s=settle_s):
                return self._bag.append((name, begin))
            self._kills_left -= 1
            self._has_killed = True
        with contextlib.suppress(KeyError):  # what it would strike is being restarted
            self._begin(name, begin)

    def _begin(self, name: str, begin: Callable[[], Struck]) -> None:
        takes_decode = name in ("kill_decode", "kill_engine_of_decode", "freeze_decode")
        if takes_decode:
            self._begin_outage()
        struck = begin()
        self.struck[name] += 1
        self._say(struck.what)
        if struck.repair is not None:
            self._repairs.append((time.monotonic() + struck.lasts_s, name, struck.repair))

    def _repair_due(self, now_s: float) -> None:
        due = [repair for repair in self._repairs if repair[0] <= now_s]
        self._repairs = [repair for repair in self._repairs if repair[0] > now_s]
        for _, name, repair in due:
            repair()
            if name == "freeze_decode" and self.supervisor.serving_since_s["decode"] is not None:
                self._end_outages()

    def _begin_outage(self) -> None:
        self.outages.append(Outage(time.monotonic()))

    def _end_outages(self) -> None:
        for outage in self.outages:
            if outage.ended_s is None:
                outage.ended_s = time.monotonic() + PROXY_NOTICES_S

    def _kinds(self) -> dict[str, Callable[[], Struck]]:
        faults = self._faults
        kinds: dict[str, Callable[[], Struck]] = {
            "kill_both_agents": faults.kill_both_agents,
            "kill_metadata": faults.kill_metadata,
            "freeze_metadata": faults.freeze_metadata,
        }
        for role in INSTANCES:
            kinds[f"kill_agent_of_{role}"] = lambda role=role: faults.kill_agent(role)  # type: ignore[misc]
            kinds[f"freeze_agent_of_{role}"] = lambda role=role: faults.freeze_agent(role)  # type: ignore[misc]
            kinds[f"freeze_{role}"] = lambda role=role: faults.freeze_instance(role)  # type: ignore[misc]
            kinds[f"kill_{role}"] = lambda role=role: faults.kill_instance(role)  # type: ignore[misc]
            kinds[f"kill_engine_of_{role}"] = lambda role=role: faults.kill_engine_process(role)  # type: ignore[misc]
        if self._has_link:
            kinds.update(cut_link=faults.cut_link, delay_link=faults.delay_link, lossy_link=faults.lossy_link)
        return kinds
