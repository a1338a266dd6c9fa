"""Every engine feature that the CPU pin can run, against one plain instance: ``python -m tests.soak.equality [SUITE …]``

Each suite compares tokens and log probabilities of a real pair with those of one plain instance, and decode's counters say
whether it skipped the prompts' computation, as it should, or computed them, where the design says so. Suites:

- requests: n, best_of, beam search, guided decoding, logit processors, penalties, stops, echo, chat (tests/e2e/features.py)
- offline: bad words and logit processors in Python, through `LLM`, which the server's requests cannot express
- gemma, mistral-nemo, opt-projected: head size, KV heads and output width that do not follow from the config
- mistral-window: prompts within and beyond a sliding window
- preemption, aborts: on the mistral-nemo model, with room for 1,600 tokens
- refused: what vLLM's own CPU worker or this package refuses, in whose words

Prints a line for each suite; exit code 1 if one fails. About eight minutes on two free cores.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Sequence

from mooncake_v0.errors import MooncakeV0Error
from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import Pair, PairOptions, find_free_port
from mooncake_v0.pin.tiny_model import make_tiny_model
from tests.e2e import engine_suites
from tests.e2e.asking import counters, hits, misses, token_prompt
from tests.e2e.conftest import PLAIN_ENVIRONMENT, make_pair
from tests.e2e.engine_suites import FEW_BLOCKS, Servers, serve
from tests.e2e.features import FEATURES, NEED_OUTLINES, assert_same
from tests.e2e.models import make_model

OFFLINE_LENGTHS = (5, 33, 400)


def tiny_model() -> str:
    return str(make_tiny_model(cache_folder() / "tiny-qwen2"))


# --- suites -----------------------------------------------------------------------------------------------------------


def check_requests(folder: Path) -> str:
    """All of tests.e2e.features on one pair; each failure is named."""
    has_outlines = importlib.util.find_spec("datasets") is not None
    names = [name for name in FEATURES if has_outlines or name not in NEED_OUTLINES]
    pair, port, failed = make_pair(tiny_model(), folder), find_free_port(), []
    try:
        plain = pair.start_plain(port, environment=PLAIN_ENVIRONMENT)
        pair.start_all()
        pair.wait_ready(plain)
        pair.wait_connected()
        for name in names:
            try:
                assert_same(name, f"http://127.0.0.1:{port}", pair, tiny_model())
            except (AssertionError, OSError) as error:
                failed.append(f"{name}: {error!r:.300}")
    finally:
        pair.stop_all()
    assert not failed, "\n".join(failed)
    left_out = "" if has_outlines else f", not {len(NEED_OUTLINES)} that need outlines: the package datasets is missing"
    return f"{len(names)} features{left_out}"


def on_model(name: str, *checks: Callable[[Servers], None], pair_args: Sequence[str] = ()) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        with serve(make_model(name), folder, pair_args=pair_args) as servers:
            for one in checks:
                one(servers)
            found = counters(servers.pair)
            return f"{hits(found):.0f} hits, {misses(found):.0f} computed"

    return check


def check_offline(folder: Path) -> str:
    """The same requests through three `LLM`s, one after the other but for the pair, which must meet."""
    pair = Pair(PairOptions(tiny_model(), folder))
    children: list[subprocess.Popen[str]] = []
    try:
        pair.wait_ready(pair.start_metadata())
        plain = start_offline(pair, "", children)
        expected = answers_of(plain)
        prefill, decode = (start_offline(pair, role, children) for role in ("kv_producer", "kv_consumer"))
        pair.wait_connected(timeout_s=300)
        answers_of(prefill)
        assert answers_of(decode) == expected
        found = counters(pair)
        asked = len(OFFLINE_LENGTHS) * len(expected)
        assert (hits(found), misses(found)) == (asked, 0), found
        return f"{asked} requests with bad words and logit processors"
    finally:
        for child in children:
            child.kill()
            child.wait()
        pair.stop_all()


def start_offline(pair: Pair, role: str, children: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    environment = {**os.environ, "MOONCAKE_CONFIG_PATH": str(pair.config_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "tests.soak.offline", pair.options.model, role]
    pipe = subprocess.PIPE
    children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
    return children[-1]


def answers_of(child: subprocess.Popen[str]) -> dict[str, Any]:
    """Let it answer every request; see tests.soak.offline."""
    assert child.stdin is not None and child.stdout is not None
    print(json.dumps([token_prompt(length, 77) for length in OFFLINE_LENGTHS]), file=child.stdin, flush=True)
    for line in child.stdout:
        if line.startswith("{"):
            answers: dict[str, Any] = json.loads(line)
            return answers
    raise AssertionError(f"an engine has ended with exit code {child.wait()}")


# arguments of a decode instance → the reason in its log
REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "LoRA on a CPU": (("--enable-lora",), "cpu backend doesn't support LoRA"),
    "an fp8 cache on a CPU": (("--kv-cache-dtype", "fp8"), "does not support FP8 KV cache"),
    "pipeline parallel": (("--pipeline-parallel-size", "2"), "a stage has only its layers' KV"),
    "speculative decoding": (
        ("--speculative-model", "[ngram]", "--num-speculative-tokens", "2", "--ngram-prompt-lookup-max", "2"),
        "the draft model's KV is not transferred",
    ),
    "multi-step": (("--num-scheduler-steps", "4"), "its worker prepares several steps at once"),
    "an embedding model": (("--task", "embedding"), "an embedding model has no decode phase"),
    "adapters beside prefix caching": (("--enable-lora", "--enable-prefix-caching"), "does not tell adapters apart"),
}


def check_refused(folder: Path) -> str:
    """A decode instance that must not start ends with a non-zero code and the reason."""
    for name, (arguments, reason) in REFUSED.items():
        pair = make_pair(tiny_model(), folder / name.replace(" ", "-"))
        try:
            assert_refused(name, pair, arguments, reason)
        finally:
            pair.stop_all()
    window = make_model("qwen2-window")
    pair = make_pair(window, folder / "window")
    try:
        assert_refused("a window of Qwen2", pair, (), "Sliding window for some but all layers is not supported")
    finally:
        pair.stop_all()
    return f"{len(REFUSED) + 1} with their reasons"


def assert_refused(name: str, pair: Pair, arguments: Sequence[str], reason: str) -> None:
    process = pair.start_instance("decode", arguments)
    try:
        pair.wait_ready(process)
    except MooncakeV0Error:
        assert process.popen.returncode, f"{name}: exit code {process.popen.returncode}"
        assert reason in process.log.read_text(), f"{name}: {process.log_tail(30)}"
    else:
        raise AssertionError(f"{name} was served")


SUITES: dict[str, Callable[[Path], str]] = {
    "requests": check_requests,
    "offline": check_offline,
    "gemma": on_model("gemma", engine_suites.check_lengths),
    "mistral-nemo": on_model("mistral-nemo", engine_suites.check_lengths),
    "mistral-window": on_model("mistral-window", engine_suites.check_window),
    "opt-projected": on_model("opt-projected", engine_suites.check_lengths),
    "preemption": on_model(
        "mistral-nemo",
        engine_suites.check_preemption_on_decode,
        engine_suites.check_preemption_on_prefill,
        pair_args=FEW_BLOCKS,
    ),
    "aborts": on_model("mistral-nemo", engine_suites.check_many_aborts, pair_args=FEW_BLOCKS),
    "refused": check_refused,
}


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        print(f"error: no suite {unknown[0]!r}\n  fix: one of {', '.join(SUITES)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every process is ended
    failed = False
    for name in names or SUITES:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = "good, " + SUITES[name](Path(folder))
            except (AssertionError, MooncakeV0Error, OSError) as error:
                failed, outcome = True, f"FAILED: {error}\n{traceback.format_exc(limit=-3)}"
        print(f"{name}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
