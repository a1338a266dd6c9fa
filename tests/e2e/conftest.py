"""Real instances of the pinned vLLM on real metadata services; started once for the session."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Iterator, Sequence

import pytest

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import ManagedProcess, Pair, PairOptions, find_free_port
from mooncake_v0.pin.tiny_model import CPU_DTYPE, make_tiny_model
from tests.quick import QUICK_START, python_path

VLLM_ARGS = ("--dtype", CPU_DTYPE, "--max-model-len", "4096", "--disable-log-requests")
KV_BLOCKS = ("--num-gpu-blocks-override", "8192")  # of the tiny model 256 MB: the CPU worker writes zeros to all of it
# As between two hosts, where this is not set otherwise; both sides are on this one, and would map the buffer.
TRANSPORT = os.environ.get("MOONCAKE_V0_TRANSPORT", "engine")
ENVIRONMENT = {**QUICK_START, "MOONCAKE_V0_TRANSPORT": TRANSPORT}
# a plain instance has nothing that mends guided decoding with outlines
PLAIN_ENVIRONMENT = {"PYTHONPATH": python_path("quick_start", "stand_ins/outlines")}
KV_BUFFER_BYTES = 200_000_000


@pytest.fixture(scope="session")
def tiny_model() -> str:
    return str(make_tiny_model(cache_folder() / "tiny-qwen2"))


def make_pair(
    model: str,
    folder: Path,
    metadata_url: str | None = None,
    transport: str = TRANSPORT,
    more_args: Sequence[str] = (),
    **changes: object,
) -> Pair:
    """A pair that is not started yet."""
    options = PairOptions(
        model,
        folder,
        metadata_url=metadata_url,
        kv_buffer_size=KV_BUFFER_BYTES,
        vllm_args=[*VLLM_ARGS, *KV_BLOCKS, *more_args],
        environment={**ENVIRONMENT, "MOONCAKE_V0_TRANSPORT": transport},
        **changes,  # type: ignore[arg-type]
    )
    return Pair(options)


@pytest.fixture(scope="session")
def plain_and_pair(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Pair]]:
    """One plain instance's URL and a connected pair over our own metadata server, with equal URLs in mooncake.json."""
    pair = make_pair(tiny_model, tmp_path_factory.mktemp("pair"))
    try:
        port = find_free_port()
        plain = pair.start_plain(port, environment=PLAIN_ENVIRONMENT)
        pair.start_all()
        pair.wait_ready(plain)
        pair.wait_connected()
        yield f"http://127.0.0.1:{port}", pair
    finally:
        pair.stop_all()


@pytest.fixture(scope="session")
def plain_url(plain_and_pair: tuple[str, Pair]) -> str:
    return plain_and_pair[0]


@pytest.fixture(scope="session")
def pair(plain_and_pair: tuple[str, Pair]) -> Pair:
    return plain_and_pair[1]


@pytest.fixture(scope="session")
def etcd_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real etcd of one member."""
    folder = tmp_path_factory.mktemp("etcd")
    client, peer = (f"http://127.0.0.1:{find_free_port()}" for _ in range(2))
    command = ["etcd", "--data-dir", str(folder / "data"), "--listen-client-urls", client]
    command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    log = folder / "etcd.log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": ""},
        )
    process = ManagedProcess("etcd", popen, log, f"{client}/health")
    try:
        deadline = time.monotonic() + 30
        while not process.is_ready():
            assert time.monotonic() < deadline and popen.poll() is None, process.log_tail()
            time.sleep(0.1)
        yield client.replace("http://", "etcd://")
    finally:
        process.stop()
