"""What a configured transfer costs while its peer is absent: plain vLLM against decode and prefill without the other side.

    python -m tests.soak.overhead [--rounds 200] [--most 600]

Four engines of the pin run one after the other in every round, in turning order, over the same fresh prompts (short and
middle ones, 16 tokens of answer each): plain, decode and prefill with a --kv-transfer-config whose peer does not run, and
a second plain one, which shows what this machine can tell apart at all. Of each run the processor time of the engine's
process and its agent counts, and the time by the clock; a round gives one ratio to its two plain runs. Printed are the
geometric mean of the ratios and its 95 % interval. Rounds go on after the first 200 until the interval is clear of 1.01,
at most 600.
Exit code 0: the overhead of both roles in processor time is below 1 % with its whole interval; 1: it is not, or that
could not be shown. Takes about a quarter of an hour on two free cores; on a busy machine a run lasts longer than its
processor time, and what the agent uses each second by the clock (0.2 to 0.4 % of a core) counts for too much.
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

LIMIT = 1.01
SHORT, MIDDLE = 24, 8  # prompts a run
ANSWER_TOKENS = 16
WARM_UP_ROUNDS = 3
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
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
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
    llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=16, **transfer)
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


def ratio_of(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """Of the rounds' pairs, with the interval of 2,000 draws from them."""
    logs = [math.log(one / other) for one, other in zip(ones, others)]
    chance = random.Random(0)
    means = sorted(_trimmed_mean(chance.choices(logs, k=len(logs))) for _ in range(2000))
    return Ratio(*(math.exp(value) for value in (_trimmed_mean(logs), means[49], means[1949])))


def _trimmed_mean(values: Sequence[float]) -> float:
    """Without the outer tenth on either side, when something else took the machine."""
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def measure(engines: dict[str, Engine], rounds: int, most: int) -> dict[str, list[Run]]:
    """One run of each a round, until the roles' ratios are decided."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for number in range(WARM_UP_ROUNDS):
        for engine in engines.values():
            engine.run(number)
    names = list(engines)
    for number in range(most):
        turned = [names[(number + index) % len(names)] for index in range(len(names))]
        for name in turned if number % 2 else reversed(turned):
            runs[name].append(engines[name].run(1000 + number))
        if number + 1 >= rounds and all(cpu_ratio(runs, name).is_decided for name in ("decode", "prefill")):
            break
    return runs


def cpu_ratio(runs: dict[str, list[Run]], name: str) -> Ratio:
    return ratio_of(
        [run.cpu_s for run in runs[name]], _plain(runs, name, [run.cpu_s for run in runs["plain"]], "cpu_s")
    )


def clock_ratio(runs: dict[str, list[Run]], name: str) -> Ratio:
    plain = [run.clock_s for run in runs["plain"]]
    return ratio_of([run.clock_s for run in runs[name]], _plain(runs, name, plain, "clock_s"))


def _plain(runs: dict[str, list[Run]], name: str, plain: list[float], field: str) -> list[float]:
    """What to compare with: both plain engines of a round, or the first one for the second."""
    if name == "plain again":
        return plain
    return [math.sqrt(one * getattr(other, field)) for one, other in zip(plain, runs["plain again"])]


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
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--most", type=int, default=600)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every process is ended
    model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    with tempfile.TemporaryDirectory() as folder, start(model, Path(folder)) as engines:
        runs = measure(engines, options.rounds, options.most)
    print(f"{len(runs['plain'])} rounds of {SHORT + MIDDLE} prompts; plain: "
          f"{statistics.median(run.cpu_s for run in runs['plain']):.2f} s of processor time a round")  # fmt: skip
    for name in [name for name in ROLES if name != "plain"]:
        print(f"{name:12} processor time {cpu_ratio(runs, name)}, by the clock {clock_ratio(runs, name)} of plain")
    good = all(cpu_ratio(runs, name).high < LIMIT for name in ("decode", "prefill"))
    print("below 1 %" if good else "NOT SHOWN to be below 1 %")
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve_rounds(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
