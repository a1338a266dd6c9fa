"""What a configured transfer costs while its peer is absent: plain vLLM against decode and prefill without the other side.

    python -m tests.soak.overhead [--starts 12] [--most 40] [--rounds 30]

Four engines of the pin run one after the other in every round, in turning order, over the same fresh prompts (short and
middle ones, 16 tokens of answer each): plain, decode and prefill with a --kv-transfer-config whose peer does not run, and
a second plain one, which shows what this machine can tell apart at all. Two processes of the same plain engine differ by
about 1 % for as long as they live, so all four are started afresh again and again, and a start, not a round, is what
counts: each gives one ratio of a role to its two plain engines. Printed are the means of these ratios and their 95 %
intervals, of throughput (time by the clock) and of processor time, the agent's included. Starts go on after the first 12
until the throughput's interval is clear of 1.01, at most 40.
Exit code 0: both roles' throughput is less than 1 % below plain's with the whole interval; 1: it is not, or that could not
be shown. The model is tiny, so everything that a step does beside it is seen at its largest. Takes about ten
minutes on two free cores; on a busy machine the intervals stay wide.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import Pair, PairOptions
from mooncake_v0.pin.tiny_model import make_tiny_model
from tests.quick import QUICK_START

LIMIT = 1.01
SHORT, MIDDLE = 5, 1  # prompts a run, which is short, so that what slows the machine meets all four engines
ANSWER_TOKENS = 16
WARM_UP_ROUNDS = 2
ROLES = {"plain": None, "decode": "kv_consumer", "prefill": "kv_producer", "plain again": None}
PORTS_OF_A_SIDE = 48


@dataclass(frozen=True)
class Run:
    """One run of one engine: processor time of its processes and time by the clock, in seconds."""

    cpu_s: float
    clock_s: float


class Engine:
    """A child process with an `LLM` of its own; `run` makes it answer one round's prompts."""

    def __init__(self, model: str, role: str | None, config: Path) -> None:
        command = [sys.executable, "-m", "tests.soak.overhead", "--engine", model, *([role] if role else [])]
        environment = {**os.environ, "MOONCAKE_CONFIG_PATH": str(config), "VLLM_LOGGING_LEVEL": "ERROR"}
        environment |= QUICK_START
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def run(self, seed: int) -> Run:
        assert self._child.stdin is not None and self._child.stdout is not None
        print(seed, file=self._child.stdin, flush=True)
        for line in self._child.stdout:
            if line.startswith("{"):
                return Run(**json.loads(line))
        raise SystemExit("error: an engine has ended")

    def close(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait(60)


def make_prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    lengths = [chance.randint(8, 120) for _ in range(SHORT)] + [chance.randint(300, 900) for _ in range(MIDDLE)]
    return [chance.choices(range(3, 512), k=length) for length in lengths]


# --- the child --------------------------------------------------------------------------------------------------------


def serve_rounds(model: str, role: str | None) -> None:
    """Answers a round for each line of standard input, until it closes."""
    from vllm import LLM, SamplingParams

    transfer: dict[str, Any] = {}
    if role:
        rank = int(role == "kv_consumer")
        names = {"kv_connector": "MooncakeConnector", "kv_role": role, "kv_rank": rank, "kv_parallel_size": 2}
        transfer = {"kv_transfer_config": {**names, "kv_buffer_size": 2e8}}
    llm = LLM(model, dtype="float32", max_model_len=2048, max_num_seqs=16, **transfer)
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": tokens} for tokens in make_prompts(int(line))]
        cpu_s, clock_s = _cpu_s(), time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        print(json.dumps({"cpu_s": _cpu_s() - cpu_s, "clock_s": time.perf_counter() - clock_s}), flush=True)


def _cpu_s() -> float:
    """Processor time so far of this process and of its agent, of whose threads none ends during a run."""
    import psutil

    children = psutil.Process().children(recursive=True)
    tasks = [task for child in children for task in Path(f"/proc/{child.pid}/task").glob("*/schedstat")]
    return time.process_time() + sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


# --- the comparison ---------------------------------------------------------------------------------------------------


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


Runs = dict[str, list[Run]]  # of one start, per engine one a round


def measure(engines: dict[str, Engine], rounds: int, first: int) -> Runs:
    """One run of each engine a round. first: number of the first round, so that no prompt comes twice."""
    runs: Runs = {name: [] for name in engines}
    for number in range(WARM_UP_ROUNDS):
        for engine in engines.values():
            engine.run(number)
    names = list(engines)
    for number in range(first, first + rounds):
        turned = [names[(number + index) % len(names)] for index in range(len(names))]
        for name in turned if number % 2 else reversed(turned):
            runs[name].append(engines[name].run(1000 + number))
    return runs


def ratio(starts: Sequence[Runs], name: str, field: str) -> Ratio:
    """Of an engine to plain over the starts. field: "cpu_s" or "clock_s"."""
    return ratio_of([statistics.median(_log_ratios(runs, name, field)) for runs in starts])


def _log_ratios(runs: Runs, name: str, field: str) -> list[float]:
    """Per round, to both plain engines, or of the second one to the first."""
    logs = {one: [math.log(getattr(run, field)) for run in runs[one]] for one in runs}
    plain = logs["plain"]
    if name != "plain again":
        plain = [(one + other) / 2 for one, other in zip(plain, logs["plain again"])]
    return [one - other for one, other in zip(logs[name], plain)]


def is_decided(starts: Sequence[Runs]) -> bool:
    return all(ratio(starts, name, "clock_s").is_decided for name in ("decode", "prefill"))


@contextlib.contextmanager
def start(model: str, folder: Path) -> Iterator[dict[str, Engine]]:
    """A metadata server and the four engines. Decode and prefill are of two pairs, so that neither is the other's peer."""
    pair = Pair(PairOptions(model, folder))
    configs = {"kv_consumer": pair.config_path, "kv_producer": folder / "other.json"}
    config = json.loads(pair.config_path.read_text())
    endpoint = f"127.0.0.1:{pair.engine_port + PORTS_OF_A_SIDE}"  # between the ports of the first pair
    configs["kv_producer"].write_text(json.dumps({**config, "prefill_url": endpoint, "decode_url": endpoint}))
    engines: dict[str, Engine] = {}
    try:
        pair.wait_ready(pair.start_metadata())
        for name, role in ROLES.items():
            engines[name] = Engine(model, role, configs.get(role or "", pair.config_path))
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
        pair.stop_all()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every process is ended
    model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    starts: list[Runs] = []
    while len(starts) < options.starts or (len(starts) < options.most and not is_decided(starts)):
        with tempfile.TemporaryDirectory() as folder, start(model, Path(folder)) as engines:
            starts.append(measure(engines, options.rounds, len(starts) * options.rounds))
        print(f"start {len(starts)}: {_of_one(starts[-1])}", flush=True)
    for name in [name for name in ROLES if name != "plain"]:
        clock, cpu = (ratio(starts, name, field) for field in ("clock_s", "cpu_s"))
        print(f"{name:12} by the clock {clock}, processor time {cpu} of plain")
    good = all(ratio(starts, name, "clock_s").high < LIMIT for name in ("decode", "prefill"))
    print("below 1 % of throughput" if good else "NOT SHOWN to be below 1 % of throughput")
    return 0 if good else 1


def _of_one(runs: Runs) -> str:
    """By the clock, of one start."""
    ratios = {name: math.exp(statistics.median(_log_ratios(runs, name, "clock_s"))) for name in runs if name != "plain"}
    return ", ".join(f"{name} {value:.4f}" for name, value in ratios.items())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve_rounds(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
