"""What a configured transfer costs while its peer is absent, in throughput: decode and prefill with it and without.

    python -m tests.soak.overhead [--rounds 200] [--most 2000]

Two processes of one plain engine differ by 1 to 2 % for as long as they live, more than what is to be measured. So each
engine of the pin is compared with itself: in every round it answers the same fresh prompts (short and middle ones, 16
tokens of answer each) twice, once as it is, and once as plain vLLM: everything of vLLM that this package has wrapped is
put back as it was, and the agent's process is stopped. Before, it is seen that no line of this package runs in the engine's
thread then. Printed are the mean ratio of the times by the clock and its 95 % interval; a second measurement of the same
kind, plain beside plain, shows what this machine can tell apart. Rounds go on after the first 200 until the interval
is clear of 1.01, at most 2,000.
Exit code 0: both roles are less than 1 % slower, with the whole interval; 1: they are not, or that could not be shown. The
model is tiny, so everything that a step does beside it is seen at its largest. Takes about ten minutes on two free cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Iterator, Sequence

import mooncake_v0
from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import Pair, PairOptions
from mooncake_v0.pin.tiny_model import CPU_DTYPE, make_tiny_model
from tests.freezing import freeze, thaw
from tests.quick import QUICK_START

LIMIT = 1.01
SHORT, MIDDLE = 5, 1  # prompts a run, which is short, so that what slows the machine meets both halves of a round
ANSWER_TOKENS = 16
WARM_UP_ROUNDS = 3
LOOK_EVERY = 50  # rounds
ROLES = {"decode": "kv_consumer", "prefill": "kv_producer"}
PORTS_OF_A_SIDE = 48
OURS = os.path.dirname(mooncake_v0.__file__)


def make_prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    lengths = [chance.randint(8, 120) for _ in range(SHORT)] + [chance.randint(300, 900) for _ in range(MIDDLE)]
    return [chance.choices(range(3, 512), k=length) for length in lengths]


# --- the child --------------------------------------------------------------------------------------------------------


class Hooks:
    """Everything of vLLM in this process that the package has wrapped; `set` puts the originals in place, or the wrappers."""

    def __init__(self, engine: Any) -> None:
        import psutil

        worker = engine.model_executor.driver_worker
        model, schedulers = worker.model_runner.model, engine.scheduler
        objects = [engine, *schedulers, *(scheduler.block_manager for scheduler in schedulers)]
        objects += [worker, worker.model_runner, model, model.logits_processor]
        modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "vllm"]
        classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
        self._found = [
            (owner, name, value)
            for owner in [*objects, *modules, *classes]
            for name, value in list(vars(owner).items())
            if _is_ours(value) and hasattr(value, "__wrapped__")
        ]
        (self._agent,) = [
            child.pid for child in psutil.Process().children() if "mooncake_v0" in " ".join(child.cmdline())
        ]

    @property
    def names(self) -> list[str]:
        return sorted({name for _, name, _ in self._found})

    def set(self, active: bool) -> None:
        for owner, name, wrapper in self._found:
            original = wrapper
            while _is_ours(original):
                original = original.__wrapped__
            setattr(owner, name, wrapper if active else original)
        (thaw if active else freeze)(self._agent)


def _is_ours(value: Any) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(OURS)


@contextlib.contextmanager
def counting_our_calls(calls: list[str]) -> Iterator[None]:
    """Of functions of this package, in this thread."""

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def serve_runs(model: str, role: str) -> None:
    """Answers a run for each line of standard input (seed, 1 with the package or 0 without), until it closes."""
    from vllm import LLM, SamplingParams

    names = {"kv_connector": "MooncakeConnector", "kv_role": role, "kv_rank": int(role == "kv_consumer")}
    transfer = {**names, "kv_parallel_size": 2, "kv_buffer_size": 2e8}
    llm = LLM(model, dtype=CPU_DTYPE, max_model_len=2048, max_num_seqs=16, kv_transfer_config=transfer)
    hooks, sampling = Hooks(llm.llm_engine), SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def answer(seed: int) -> float:
        prompts = [{"prompt_token_ids": tokens} for tokens in make_prompts(seed)]
        started_s = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started_s

    for active in (True, False):
        calls: list[str] = []
        hooks.set(active)
        with counting_our_calls(calls):
            answer(0)
        assert bool(calls) == active, f"{role}, active {active}: {sorted(set(calls))}, wrapped: {hooks.names}"
    for line in sys.stdin:
        seed, active = map(int, line.split())
        hooks.set(bool(active))
        print(json.dumps(answer(seed)), flush=True)
    hooks.set(True)  # so that the agent can be told to end


# --- the comparison ---------------------------------------------------------------------------------------------------


class Engine:
    """A child process with an `LLM` of its own; `run` makes it answer one run's prompts and gives the seconds."""

    def __init__(self, model: str, role: str, config: Path) -> None:
        command = [sys.executable, "-m", "tests.soak.overhead", "--engine", model, role]
        environment = {**os.environ, "MOONCAKE_CONFIG_PATH": str(config), "VLLM_LOGGING_LEVEL": "ERROR"}
        environment |= QUICK_START
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def run(self, seed: int, *, active: bool) -> float:
        assert self._child.stdin is not None and self._child.stdout is not None
        print(seed, int(active), file=self._child.stdin, flush=True)
        for line in self._child.stdout:
            with contextlib.suppress(ValueError):
                return float(line)
        raise SystemExit("error: an engine has ended")

    def close(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait(60)


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of ratios with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def is_decided(self) -> bool:
        return self.high < LIMIT or self.low > LIMIT

    def __str__(self) -> str:
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


def ratio_of(logs: Sequence[float]) -> Ratio:
    """Of the logarithms of independent ratios, with the interval of 2,000 draws from them."""
    chance = random.Random(0)
    means = sorted(_trimmed_mean(chance.choices(logs, k=len(logs))) for _ in range(2000))
    return Ratio(*(math.exp(value) for value in (_trimmed_mean(logs), means[49], means[1949])))


def _trimmed_mean(values: Sequence[float]) -> float:
    """Without the outer tenth on either side, when something else took the machine."""
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


@dataclass
class Comparison:
    """Of one engine with itself: logarithms of the rounds' ratios, with the package over plain, and plain over plain."""

    engine: Engine
    logs: list[float] = field(default_factory=list)
    control: list[float] = field(default_factory=list)

    def add_round(self, number: int) -> None:
        """Three runs in turning order of the same prompts: with the package, plain, and plain again."""
        order = [(number + index) % 3 for index in range(3)]
        seconds = {which: self.engine.run(1000 + number, active=which == 0) for which in order}
        with_it, plain, again = (math.log(seconds[which]) for which in range(3))
        self.logs.append(with_it - (plain + again) / 2)
        self.control.append(plain - again)


@contextlib.contextmanager
def started(model: str, folder: Path) -> Iterator[dict[str, Comparison]]:
    """A metadata server and both engines, which are of two pairs, so that neither is the other's peer."""
    pair = Pair(PairOptions(model, folder))
    configs = {"decode": pair.config_path, "prefill": folder / "other.json"}
    config = json.loads(pair.config_path.read_text())
    endpoint = f"127.0.0.1:{pair.engine_port + PORTS_OF_A_SIDE}"  # between the ports of the first pair
    configs["prefill"].write_text(json.dumps({**config, "prefill_url": endpoint, "decode_url": endpoint}))
    engines: list[Engine] = []
    try:
        pair.wait_ready(pair.start_metadata())
        engines += [Engine(model, role, configs[name]) for name, role in ROLES.items()]
        yield dict(zip(ROLES, map(Comparison, engines)))
    finally:
        for engine in engines:
            engine.close()
        pair.stop_all()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--most", type=int, default=2000)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every process is ended
    model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    with tempfile.TemporaryDirectory() as folder, started(model, Path(folder)) as comparisons:
        for number in range(-WARM_UP_ROUNDS, options.most):
            for comparison in comparisons.values():
                comparison.add_round(number)
            if number < 0:
                comparison_logs = [log for one in comparisons.values() for log in (one.logs, one.control)]
                for logs in comparison_logs:
                    logs.clear()
            elif (number + 1) % LOOK_EVERY == 0 or number + 1 == options.most:
                ratios = {name: ratio_of(comparison.logs) for name, comparison in comparisons.items()}
                print(f"{number + 1} rounds: " + ", ".join(f"{name} {one}" for name, one in ratios.items()), flush=True)
                if number + 1 >= options.rounds and all(one.is_decided for one in ratios.values()):
                    break
    good = True
    for name, comparison in comparisons.items():
        ratio = ratio_of(comparison.logs)
        print(f"{name:8} {ratio} of plain; plain beside plain {ratio_of(comparison.control)}")
        good = good and ratio.high < LIMIT
    print("below 1 % of throughput" if good else "NOT SHOWN to be below 1 % of throughput")
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve_runs(sys.argv[2], sys.argv[3])
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
