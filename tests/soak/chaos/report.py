"""Progress lines while the soak runs, and its result."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.soak.chaos.chaos import Chaos
from tests.soak.chaos.load import ABORTED, EQUAL, FAILED, LATE, WRONG, Load, Outcome
from tests.soak.chaos.resources import MIB, Resources

PROGRESS_EVERY_S = 10.0
SHOWN = 5


class Progress:
    """Prints lines that begin with the seconds since the start."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._next_s = 0.0

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:7.1f}  {text}", flush=True)

    def load(self, load: Load) -> bool:
        """What the clients have got so far, every ten seconds; whether it was said now."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + PROGRESS_EVERY_S
        oldest_s = max((now_s - since for since in list(load.in_flight.values())), default=0.0)
        counts = ", ".join(f"{load.counts[kind]} {kind}" for kind in (EQUAL, ABORTED, FAILED, WRONG, LATE))
        self.say(f"requests: {counts}; {len(load.in_flight)} in flight, the oldest for {oldest_s:.0f} s")
        return True


@dataclass
class Result:
    """problems: why the soak has failed; empty when it has not."""

    seed: int
    isolated: bool
    problems: list[str] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed_without_decode: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    hit_rate: float = 0.0
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def add_load(self, load: Load, chaos: Chaos) -> None:
        """Judge every request: equal, or left by its client, or failed while decode was away. Nothing else."""
        self.requests = dict(load.counts)
        if load.seconds:
            ordered = sorted(load.seconds)
            self.seconds = {
                "median": statistics.median(ordered),
                "p99": ordered[int(0.99 * (len(ordered) - 1))],
                "longest": ordered[-1],
            }
        excused = [one.kind == FAILED and chaos.excuses(one.started_s, one.ended_s) for one in load.noteworthy]
        self.failed_without_decode = sum(excused)
        self.faults, self.restarts = dict(chaos.struck), dict(chaos.supervisor.restarts)
        bad = [one for one, is_excused in zip(load.noteworthy, excused) if not is_excused]
        for kind, ones in _by_kind(bad).items():
            self.problems.append(f"{len(ones)} requests {kind}, such as {[_short(one) for one in ones[:SHOWN]]}")
        if not load.counts[EQUAL]:
            self.problems.append("no request was answered")

    def add_resources(self, before: Resources, after: Resources, found: list[str]) -> None:
        self.before, self.after = asdict(before), asdict(after)
        self.problems += found

    def as_json(self) -> str:
        return json.dumps({"passed": not self.problems, **asdict(self)}, indent=1)

    def print(self) -> None:
        times = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        print(f"requests   {dict(sorted(self.requests.items()))}; {times}")
        print(f"           {self.failed_without_decode} of the failed ones while decode was away")
        print(f"faults     {sum(self.faults.values())}: {dict(sorted(self.faults.items()))}")
        print(f"restarts   {self.restarts}")
        print(f"hit rate   {self.hit_rate:.1%} of fresh prompts afterwards")
        for name, old in self.before.get("parts", {}).items():
            new = self.after["parts"].get(name, {})
            print(f"           {name:16} {_held_text(old)}  ->  {_held_text(new) if new else 'gone'}")
        for name in ("pools", "keys", "shared", "strays"):
            print(f"           {name:16} {len(self.before.get(name, []))}  ->  {len(self.after.get(name, []))}")
        for problem in self.problems:
            print(f"PROBLEM    {problem}")
        print("passed" if not self.problems else "FAILED")


def _held_text(held: dict[str, int]) -> str:
    return f"{held['processes']} processes, {held['memory_bytes'] / MIB:.0f} MiB, {held['descriptors']} descriptors"


def _by_kind(ones: list[Outcome]) -> dict[str, list[Outcome]]:
    kinds = Counter(one.kind for one in ones)
    return {kind: [one for one in ones if one.kind == kind] for kind in kinds}


def _short(one: Outcome) -> str:
    return f"#{one.number} after {one.seconds:.1f} s: {one.detail[:500]}"
