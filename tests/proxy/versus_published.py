"""Added latency and throughput of the proxy against the published pattern, on one pinned core, in one run.

    python -m tests.proxy.versus_published [--rounds 5]

Backends and clients on core 0, one proxy at a time on core 1, rounds in turn; every feature of the proxy on (health,
admission, keys, metrics, access log). Prints one JSON object: medians over the rounds, and the ratios.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from tests.proxy.load import Outcome, percentile, quick_backend, run_clients

CLIENTS = 32


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def pinned(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that may run on core 1 only."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    os.sched_setaffinity(process.pid, {1})
    return process


async def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
    raise TimeoutError(f"nothing listens on port {port}")


def processor_s(pid: int) -> float:
    """Processor time that a process has used: what its one core could not do otherwise, however busy the machine is."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(url: str, decode_url: str, pid: int, requests: int) -> dict[str, float]:
    """One round: medians in ms, throughput in requests a second, processor time in ms a request."""
    one = await run_clients(url, clients=1, requests=requests // 10)
    before_s = processor_s(pid)
    many = await run_clients(url, clients=CLIENTS, requests=requests)
    json_s = processor_s(pid) - before_s
    streams = await run_clients(url, clients=CLIENTS, requests=requests // 5, stream=True)
    stream_s = processor_s(pid) - before_s - json_s
    direct = await run_clients(decode_url, clients=1, requests=requests // 10)
    direct_many = await run_clients(decode_url, clients=CLIENTS, requests=requests)
    assert one.broken + many.broken + streams.broken == 0
    added_ms = (percentile(one.latencies_s, 0.5) - 2 * percentile(direct.latencies_s, 0.5)) * 1000
    added_many_ms = (percentile(many.latencies_s, 0.5) - 2 * percentile(direct_many.latencies_s, 0.5)) * 1000
    return {
        "added_ms_1_client": added_ms,
        f"added_ms_{CLIENTS}_clients": added_many_ms,
        f"requests_per_s_{CLIENTS}_clients": rate(many),
        f"streams_per_s_{CLIENTS}_clients": rate(streams),
        "processor_ms_a_request": json_s / requests * 1000,
        "processor_ms_a_stream": stream_s / (requests // 5) * 1000,
    }


def rate(outcome: Outcome) -> float:
    return len(outcome.latencies_s) / outcome.wall_s


async def compare(rounds: int, requests: int, folder: Path) -> dict[str, Any]:
    os.sched_setaffinity(0, {0})
    _, prefill_url = await quick_backend()
    _, decode_url = await quick_backend()
    ports = {"ours": free_port(), "published": free_port()}
    ours = ["-m", "mooncake_v0", "proxy", "--prefill", prefill_url, "--decode", decode_url]
    ours += ["--port", str(ports["ours"]), "--access-log", str(folder / "access.jsonl"), "--drain-delay", "0"]
    theirs = ["-m", "tests.proxy.published_pattern", str(ports["published"]), prefill_url, decode_url]
    processes = [
        pinned([sys.executable, *ours], folder / "ours.log"),
        pinned([sys.executable, *theirs], folder / "published.log"),
    ]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
    try:
        for port in ports.values():
            await wait_for_port(port)
        await asyncio.sleep(1)
        for _ in range(rounds):
            for (name, port), process in zip(ports.items(), processes):
                url = f"http://127.0.0.1:{port}"
                seen[name].append(await measure(url, decode_url, process.pid, requests))
    finally:
        for process in processes:
            process.terminate()
            process.wait(10)
    middle = {
        name: {key: round(statistics.median(one[key] for one in runs), 3) for key in runs[0]}
        for name, runs in seen.items()
    }
    ratios = {key: round(middle["ours"][key] / middle["published"][key], 3) for key in middle["ours"]}
    return {"rounds": rounds, **middle, "ours_over_published": ratios}


@click.command(help=__doc__)
@click.option("--rounds", default=5, show_default=True)
@click.option("--requests", default=3000, show_default=True)
def main(rounds: int, requests: int) -> None:
    import uvloop

    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(uvloop.run(compare(rounds, requests, Path(folder))), indent=1))


if __name__ == "__main__":
    main()
