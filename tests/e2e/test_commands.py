"""`demo` and `launch pair` as their user types them: one command, a pair that answers, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Iterator

import psutil
import pytest

from mooncake_v0.pin.processes import find_free_range
from tests.documents import ROOT, blocks, normalised
from tests.e2e.asking import ask, token_prompt
from tests.e2e.conftest import VLLM_ARGS
from tests.quick import QUICK_START
from tests.servers import answers, free_ports, wait_until

pytestmark = [pytest.mark.pin, pytest.mark.timeout(420)]

COMMAND = [sys.executable, "-m", "mooncake_v0"]
ENVIRONMENT = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def test_the_demo_shows_a_pair_that_skipped_both_prefills(tmp_path: Path) -> None:
    """The README's first command, in an environment that is there."""
    done = subprocess.run(
        [*COMMAND, "demo", "--folder", str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True, timeout=400
    )

    assert done.returncode == 0, done.stderr
    assert re.search(r"^completion +TTFT \d+ ms  .+$", done.stdout, re.M), done.stdout
    assert re.search(r"^moved +[\d,]{7,} bytes of KV in 2 reads, [\d.]+ GB/s$", done.stdout, re.M), done.stdout
    assert "skipped the prefill of 2 of 2 prompts" in done.stdout
    readme = next(block for block in blocks(ROOT / "README.md") if block.text.startswith("metadata  pid"))
    shown = [re.sub(r"(ms|TTFT \S+ ms) .*", r"\1 …", line) for line in readme.text.splitlines()]
    printed = [re.sub(r"(ms|TTFT \S+ ms) .*", r"\1 …", line) for line in done.stdout.splitlines()]
    assert list(map(normalised, printed)) == list(map(normalised, shown))
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", done.stdout)]
    assert len(pids) == 4 and not any(map(psutil.pid_exists, pids))


@pytest.fixture
def launched(tmp_path: Path, tiny_model: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`launch pair` on one host, with its metadata server; the proxy's port."""
    base = find_free_range(150)
    metadata, prefill, decode, proxy = free_ports(4)
    endpoint = f"127.0.0.1:{base}"
    config = {"prefill_url": endpoint, "decode_url": endpoint, "protocol": "tcp", "device_name": ""}
    config["metadata_server"] = f"http://127.0.0.1:{metadata}/metadata"
    (tmp_path / "mooncake.json").write_text(json.dumps(config))
    ports = ["--prefill-port", str(prefill), "--decode-port", str(decode), "--proxy-port", str(proxy)]
    command = [*COMMAND, "launch", "pair", "mooncake.json", "--model", tiny_model, "--serve-metadata", *ports]
    command += ["--kv-buffer-size", "2e8", "--log", "logs", "--pid-file", "pid", "--", *VLLM_ARGS]
    with (tmp_path / "launch.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={**ENVIRONMENT, **QUICK_START}, stdout=log, stderr=log, text=True
        )
    try:
        yield process, proxy
    finally:
        if process.poll() is None:
            for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
        process.wait()


def test_launch_pair_serves_and_ends_with_all_its_processes(
    launched: tuple[subprocess.Popen[str], int], tmp_path: Path, tiny_model: str
) -> None:
    process, proxy = launched

    def log() -> str:
        return (tmp_path / "launch.log").read_text()

    wait_until(lambda: process.poll() is not None or answers(proxy), "the proxy listens", 300)
    assert process.poll() is None, log()
    assert (tmp_path / "pid").read_text().strip() == str(process.pid)
    body = {"model": tiny_model, "prompt": token_prompt(100, 1), "max_tokens": 4, "temperature": 0}
    status = [*COMMAND, "status", str(tmp_path / "mooncake.json")]
    wait_until(lambda: subprocess.run(status, capture_output=True).returncode == 0, "both sides connected", 60)
    assert ask(f"http://127.0.0.1:{proxy}", body)["usage"]["completion_tokens"] == 4
    shown = subprocess.run([*status, "--format", "json"], capture_output=True, text=True).stdout
    (decode,) = [agent for agent in json.loads(shown)["agents"] if agent["side"] == "decode"]
    assert (decode["hit_rate"], decode["transport"]) == (1.0, "shm")
    family = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) in (0, 143), log()
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not (tmp_path / "pid").exists()
    assert {path.name for path in (tmp_path / "logs").iterdir()} >= {"prefill.log", "decode.log"}
