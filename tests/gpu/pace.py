"""Decode's token pace on one GPU: ``python -m tests.gpu.pace FOLDER [TRANSPORT …]`` (an NVIDIA GPU with 110 GB free).

A few answers run on decode, alone and then while prompts of 16,384 tokens keep arriving there, as often as one prefill makes
them; the 8B-shaped model of `tests.gpu.latency`, CUDA graphs on. Where prefill has no GPU of its own, its computing slows
decode down whatever is transferred, so here it is done before: decode is asked for prompts that prefill still has and
decode has not. Each arrives as a whole meanwhile, its bytes with it (by the engine; a mapped pool has nothing to fetch).
Prints a line of JSON for each transport (default: cuda_ipc, shm, engine); exit code 1 if decode computed a prompt.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import ContextManager

from mooncake_v0.bench.arrivals import Arrivals, random_ids
from mooncake_v0.bench.client import Client, Prompt
from mooncake_v0.bench.pace import PaceSide, measure_side
from mooncake_v0.pin.processes import Pair, PairOptions
from tests.e2e.asking import counters, hits, misses
from tests.gpu.latency import TRANSPORTS, VLLM_ARGS, make_model

PROMPT_TOKENS, PROMPTS, OUTPUT_TOKENS = 16_384, 9, 512
PREFILL_BYTES, DECODE_BYTES = 24e9, 5e9  # room for all prompts, and for two: the rest has to come again
SEED = 1
_TIMEOUT_S = 60.0


def run(model: Path, folder: Path, transport: str) -> bool:
    """Whether decode took every prompt from prefill."""
    environment = {"MOONCAKE_V0_TRANSPORT": transport, "MOONCAKE_V0_TTL_S": "3600"}
    args = ["--disable-log-requests", *VLLM_ARGS]
    pair = Pair(PairOptions(str(model), folder, vllm_args=args, environment=environment))
    try:
        pair.wait_ready(pair.start_metadata())
        instances = []
        for role, nbytes in (("prefill", PREFILL_BYTES), ("decode", DECODE_BYTES)):
            pair.options.kv_buffer_size = nbytes
            instances.append(pair.start_instance(role))
        for instance in instances:
            pair.wait_ready(instance)
        pair.wait_ready(pair.start_proxy())
        pair.wait_connected()
        every_s = _fill(pair, folder)
        before = counters(pair)
        side = asyncio.run(_measure(pair, folder, every_s))
        after = counters(pair)
    finally:
        pair.stop_all()
    missed = misses(after) - misses(before)
    result = {
        "transport": transport,
        "arriving_tokens": PROMPT_TOKENS,
        "every_ms": round(every_s * 1000),
        **asdict(side),
        "hits": hits(after) - hits(before),
        "misses": missed,
        "read_mb": round((after.get("read_bytes", 0.0) - before.get("read_bytes", 0.0)) / 1e6),
    }
    print(json.dumps(result), flush=True)
    return not missed and side.prompts > 0


def _fill(pair: Pair, folder: Path) -> float:
    """Let prefill compute the prompts; seconds for each. The first is not counted."""
    with _arrivals(folder, pair.api_url("prefill")) as arrivals:
        arrivals.send()
        started_s = time.monotonic()
        for _ in range(PROMPTS - 1):
            arrivals.send()
        return (time.monotonic() - started_s) / (PROMPTS - 1)


async def _measure(pair: Pair, folder: Path, every_s: float) -> PaceSide:
    """The answers go through the proxy; the prompts to decode itself."""
    with _arrivals(folder, pair.api_url("decode"), every_s) as arrivals:
        async with Client(pair.proxy_url, timeout_s=_TIMEOUT_S) as client:
            source = random.Random(SEED + 1)
            return await measure_side(
                client, lambda length, output: Prompt(random_ids(source, length), output), arrivals, OUTPUT_TOKENS
            )


def _arrivals(folder: Path, url: str, every_s: float = 0.0) -> ContextManager[Arrivals]:
    return Arrivals.start(
        folder, url=url, key=None, timeout_s=_TIMEOUT_S, tokens=PROMPT_TOKENS, seed=SEED, every_s=every_s
    )


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(folder / "model")
    good = [run(model, folder / transport, transport) for transport in sys.argv[2:] or TRANSPORTS]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
