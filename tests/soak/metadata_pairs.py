"""The pinned pair, end to end, over every metadata backend; some of them fail during the run.

    python -m tests.soak.metadata_pairs [BACKEND …]

For each backend: real store, real vLLM pair with the store's URL in mooncake.json, prompts before and after the fault,
answers equal to one plain instance's, and decode's counters prove that it took the KV instead of computing it. Over redis
three engines are killed besides, `metadata ls` must show them stale, and `metadata prune` must remove exactly those while
the pair goes on answering. Takes about a minute a backend on two free cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Sequence

from mooncake_v0.errors import MooncakeV0Error
from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import Pair, find_free_port
from mooncake_v0.pin.tiny_model import make_tiny_model
from tests.e2e.asking import ask, content, counters, hits, misses, token_prompt
from tests.e2e.conftest import make_pair
from tests.engine_child import Engine, free_name
from tests.metadata_backends import BACKENDS, start_backend

COMMAND = (sys.executable, "-m", "mooncake_v0", "metadata")
PLAIN: dict[str, str] = {}


def ask_and_compare(pair: Pair, name: str) -> None:
    """Three new prompts: answers as a plain instance gives them, and decode skipped every prefill."""
    before = counters(pair)
    for length in (20, 300, 1500):
        prompt = token_prompt(length, hash((name, length)))
        body = {"model": pair.options.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3}
        assert content(ask(pair.proxy_url, body)) == content(ask(PLAIN["url"], body)), f"{name}: another answer"
    after = counters(pair)
    found = (hits(after) - hits(before), misses(after) - misses(before))
    assert found == (3, 0), f"{name}: hits and misses {found}"


def kill_three_and_prune(pair: Pair, url: str) -> None:
    gateway = start_gateway_thread(url)
    dead = [free_name() for _ in range(3)]
    for name in dead:
        victim = Engine()
        assert victim.ask("initialize", name=name, metadata=gateway.url) == 0
        victim.kill()
    gateway.close()

    def metadata(*words: str) -> dict[str, list[dict[str, str]]]:
        command = [*COMMAND, words[0], str(pair.config_path), "--format", "json", *words[1:]]
        return json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout)

    unsure = {row["name"] for row in metadata("ls")["segments"] if row["state"] == "unsure"}
    assert unsure == set(dead), f"without a record, a loopback address is unsure: {unsure}"
    pruned = metadata("prune", "--yes", "--assume-local")
    assert {row["name"] for row in pruned["stale"]} == set(dead)
    left = {row["name"]: row["state"] for row in metadata("ls")["segments"]}
    assert sorted(left.values()) == ["alive", "alive"], left


def run(name: str, model: str, folder: Path) -> None:
    started = time.monotonic()
    with ExitStack() as stack:
        backend = start_backend(name, folder, stack)
        pair = make_pair(model, folder / "pair", backend.url)
        stack.callback(pair.stop_all)
        pair.start_all()
        pair.wait_connected()
        ask_and_compare(pair, name)
        backend.fail()
        ask_and_compare(pair, name + " during its fault")
        backend.recover()
        if name == "redis":
            kill_three_and_prune(pair, backend.url)
        ask_and_compare(pair, name + " afterwards")
    print(f"{name}: good, {time.monotonic() - started:.0f} s", flush=True)


def main(names: Sequence[str]) -> int:
    failed = []
    model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        plain = make_pair(model, folder / "plain")
        stack.callback(plain.stop_all)
        port = find_free_port()
        plain.wait_ready(plain.start_plain(port))
        PLAIN["url"] = f"http://127.0.0.1:{port}"
        for name in names or BACKENDS:
            (folder / name).mkdir()
            try:
                run(name, model, folder / name)
            except (AssertionError, MooncakeV0Error, OSError) as error:
                failed.append(name)
                print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
