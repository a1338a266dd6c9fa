"""The soak itself, inside its namespaces: start, reference, warm up, measure, chaos, repair, hit rate, measure again."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Sequence

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import find_free_port
from mooncake_v0.pin.tiny_model import make_tiny_model
from tests.e2e.asking import counters, hits, misses
from tests.quick import IN_ONE_PROCESS
from tests.soak.chaos.asks import Ask, fetch_reference, make_bodies, pair_up, write_reference
from tests.soak.chaos.chaos import Chaos
from tests.soak.chaos.link import Link
from tests.soak.chaos.load import Load, ask_each_once
from tests.soak.chaos.report import Progress, Result
from tests.soak.chaos.resources import measure, memory_line, wait_settled
from tests.soak.chaos.soak_pair import SoakPair

FRESH_ROUNDS = 4
FRESH_CLIENTS = 4
HIT_RATE = 0.95
REFERENCE_TIMEOUT_S = 600.0
WARM_UP_SHARE = 0.15  # of the time of the chaos
LONGEST_WARM_UP_S = 30.0


def make_model() -> str:
    return str(make_tiny_model(cache_folder() / "tiny-qwen2"))


def bodies_of(options: argparse.Namespace, model: str) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """The prompts of the load, and those that nobody has seen when the chaos is over."""
    seed = options.seed
    return make_bodies(model, f"load-{seed}", options.prompts), make_bodies(
        model, f"fresh-{seed}", FRESH_ROUNDS * options.fresh
    )


class Soak:
    """One run; `result` says what was found."""

    def __init__(self, options: argparse.Namespace, folder: Path, *, isolated: bool) -> None:
        self.options, self.isolated = options, isolated
        self.model = make_model()
        self.result = Result(options.seed, isolated)
        self.progress = Progress()
        self._say = self.progress.say
        self._folder = folder
        self._link = Link(options.seed) if isolated else None
        self._pair = SoakPair(self.model, folder / "pair", self._link)

    def run(self) -> None:
        load_asks, fresh_asks = self._start()
        options = self.options
        # half of it goes past prefill, so that decode's memory before the chaos includes what computing takes
        urls = [self._pair.proxy_url, self._pair.api_url("decode")]
        warm_up = Load(urls, load_asks, clients=options.clients, seed=f"warm-{options.seed}").start()
        until_s = time.monotonic() + min(LONGEST_WARM_UP_S, WARM_UP_SHARE * options.seconds)
        try:
            while time.monotonic() < until_s:
                self.progress.load(warm_up)
                time.sleep(0.2)
        finally:
            warm_up.stop()
        before = measure(self._pair, isolated=self.isolated)
        self._say(f"before the chaos: {dict(warm_up.counts)}")
        self.result.problems += [f"without any fault: {one.kind} {one.detail}" for one in warm_up.noteworthy]

        self._chaos(load_asks)
        self._hit_rate(fresh_asks)
        after, found = wait_settled(before, lambda: measure(self._pair, isolated=self.isolated))
        self.result.add_resources(before, after, found)

    def close(self) -> None:
        self._pair.stop_all()
        if self._link is not None:
            self._link.close()

    def _start(self) -> tuple[list[Ask], list[Ask]]:
        """Everything at once, with a plain instance for the reference unless somebody else writes it."""
        where = "two network namespaces" if self.isolated else "loopback, without faults of the network"
        self._say(f"seed {self.options.seed}, {where}, logs in {self._folder}")
        load_bodies, fresh_bodies = bodies_of(self.options, self.model)
        reference = Path(self.options.reference or self._folder / "reference.json")
        port = find_free_port()
        plain = None if self.options.reference else self._pair.start_plain(port, IN_ONE_PROCESS)
        self._pair.start_servers()
        if plain is not None:
            self._pair.wait_ready(plain)
            self._say(f"asking a plain instance {len(load_bodies) + len(fresh_bodies)} prompts")
            write_reference(reference, fetch_reference(f"http://127.0.0.1:{port}", [*load_bodies, *fresh_bodies]))
            self._pair.stop("plain")
        self._pair.wait_served()
        self._say("the pair is connected")
        deadline_s = time.monotonic() + REFERENCE_TIMEOUT_S
        while not reference.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody wrote {reference}")
            time.sleep(0.2)
        asks = pair_up([*load_bodies, *fresh_bodies], reference)
        return asks[: len(load_bodies)], asks[len(load_bodies) :]

    def _chaos(self, asks: Sequence[Ask]) -> None:
        options, pair = self.options, self._pair
        chaos = Chaos(pair, self._say, options.seed, options.instance_kills)

        def each_look() -> None:
            if self.progress.load(load):
                self._say("memory: " + memory_line(pair))

        load = Load([pair.proxy_url], asks, clients=options.clients, seed=f"load-{options.seed}").start()
        try:
            chaos.run(options.seconds, each_look)
            self._say("the chaos is over, everything is repaired")
            if not chaos.repair_all(each_look):
                self.result.problems.append("an instance did not come back")
        finally:
            load.stop()
            self.result.add_load(load, chaos)

    def _hit_rate(self, asks: Sequence[Ask]) -> None:
        """Rounds of fresh prompts until decode takes the KV of more than 95 % of them."""
        pair, size = self._pair, self.options.fresh
        pair.wait_connected(timeout_s=120.0)
        for number in range(FRESH_ROUNDS):
            before = counters(pair)
            wrong = asyncio.run(ask_each_once(pair.proxy_url, asks[number * size :][:size], FRESH_CLIENTS))
            after = counters(pair)
            self.result.problems += [f"a fresh prompt after the chaos: {each[:500]}" for each in wrong]
            found, lost = hits(after) - hits(before), misses(after) - misses(before)
            self.result.hit_rate = found / max(1.0, found + lost)
            reasons = {name: value - before.get(name, 0.0) for name, value in after.items() if name.startswith("miss_")}
            self._say(f"fresh prompts: {found:.0f} hits, {lost:.0f} misses {reasons}")
            if self.result.hit_rate > HIT_RATE:
                return
        self.result.problems.append(f"hit rate {self.result.hit_rate:.1%} after {FRESH_ROUNDS} rounds")


def run(options: argparse.Namespace, *, isolated: bool) -> int:
    """0: nothing was found; 1: something was; 130: interrupted. Whatever happens, every process has ended afterwards."""
    folder = Path(options.folder or tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(options, folder, isolated=isolated)
    code = 130
    try:
        soak.run()
        code = 0
    except KeyboardInterrupt:
        soak.result.problems.append("interrupted")
    except Exception as error:
        soak.result.problems.append(f"{type(error).__name__}: {error}")
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            soak.close()
    soak.result.print()
    if options.json:
        Path(options.json).write_text(soak.result.as_json() + "\n")
    if soak.result.problems:
        print(f"the logs are in {folder}", file=sys.stderr)
        return code or 1
    if not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 0
