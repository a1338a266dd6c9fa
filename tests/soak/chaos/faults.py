"""What is done to the pair: every kind of fault, each with the repair that ends it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from dataclasses import dataclass
from typing import Callable

import psutil

from tests.soak.chaos.soak_pair import SoakPair

LONGEST_FREEZE_S = 8.0
LONGEST_NETWORK_FAULT_S = 12.0
LONGEST_METADATA_ABSENCE_S = 10.0

Repair = Callable[[], None]


@dataclass(frozen=True)
class Struck:
    """A fault that has begun. repair (None: the pair or its supervisor repairs it) is due after lasts_s."""

    what: str
    lasts_s: float = 0.0
    repair: Repair | None = None


def kill(process: psutil.Process | None) -> None:
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def freeze(processes: list[psutil.Process]) -> Repair:
    """SIGSTOP to all; the repair is SIGCONT to those that are still there (psutil knows a pid that was reused)."""

    def send(number: int) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    send(signal.SIGSTOP)
    return lambda: send(signal.SIGCONT)


class Faults:
    """Each method begins one fault of its kind."""

    def __init__(self, pair: SoakPair, numbers: random.Random) -> None:
        self._pair, self._numbers = pair, numbers

    def kill_agent(self, role: str) -> Struck:
        kill(self._pair.agent(role))
        return Struck(f"kill -9 of {role}'s agent")

    def kill_both_agents(self) -> Struck:
        for role in ("prefill", "decode"):
            kill(self._pair.agent(role))
        return Struck("kill -9 of both agents")

    def freeze_agent(self, role: str) -> Struck:
        agent = self._pair.agent(role)
        lasts_s = self._numbers.uniform(0.3, LONGEST_FREEZE_S)
        return Struck(f"{role}'s agent is frozen for {lasts_s:.1f} s", lasts_s, freeze([agent] if agent else []))

    def freeze_instance(self, role: str) -> Struck:
        lasts_s = self._numbers.uniform(0.3, LONGEST_FREEZE_S)
        return Struck(f"{role} is frozen as a whole for {lasts_s:.1f} s", lasts_s, freeze(self._pair.tree(role)))

    def kill_instance(self, role: str) -> Struck:
        """The API server and everything below it, as the kernel does with a container that is out of memory."""
        process = self._pair.processes[role]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return Struck(f"kill -9 of {role}")

    def kill_engine_process(self, role: str) -> Struck:
        """Only the process that computes; its API server has to notice."""
        children = [child for child in self._pair.tree(role)[1:] if child != self._pair.agent(role)]
        kill(max(children, key=_anonymous_bytes, default=None))
        return Struck(f"kill -9 of {role}'s engine process")

    def kill_metadata(self) -> Struck:
        self._pair.processes["metadata"].popen.kill()
        return Struck("kill -9 of the metadata server")

    def freeze_metadata(self) -> Struck:
        lasts_s = self._numbers.uniform(0.3, LONGEST_METADATA_ABSENCE_S)
        return Struck(
            f"the metadata server is frozen for {lasts_s:.1f} s", lasts_s, freeze(self._pair.tree("metadata"))
        )

    def cut_link(self) -> Struck:
        lasts_s = self._numbers.uniform(0.3, LONGEST_NETWORK_FAULT_S)
        return self._change_link(f"the link is cut for {lasts_s:.1f} s", lasts_s, up=False)

    def delay_link(self) -> Struck:
        lasts_s = self._numbers.uniform(1.0, LONGEST_NETWORK_FAULT_S)
        delay_ms, jitter_ms = self._numbers.uniform(5, 200), self._numbers.uniform(0, 100)
        what = f"the link delays by {delay_ms:.0f} to {delay_ms + jitter_ms:.0f} ms each way for {lasts_s:.1f} s"
        return self._change_link(what, lasts_s, delay_ms=delay_ms, jitter_ms=jitter_ms)

    def lossy_link(self) -> Struck:
        lasts_s = self._numbers.uniform(1.0, LONGEST_NETWORK_FAULT_S)
        loss = self._numbers.uniform(0.01, 0.3)
        return self._change_link(f"the link loses {loss:.0%} for {lasts_s:.1f} s", lasts_s, loss=loss)

    def _change_link(self, what: str, lasts_s: float, **state: float) -> Struck:
        link = self._pair.link
        assert link is not None
        good = {"up": True, "delay_ms": 0.0, "jitter_ms": 0.0, "loss": 0.0}
        link.set(**state)
        return Struck(what, lasts_s, lambda: link.set(**{name: good[name] for name in state}))


def _anonymous_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
