"""Load on the metadata gateway, measured against the wheel's own server in the same run.

    python -m tests.soak.metadata_load [--rounds 5]

Both servers run on core 0 over memory, the same client on core 1; rounds alternate. Prints, for PUT and GET, requests
per second of the server's processor time, p99, and the ratio of requests per second by the clock; then how long
`metadata ls` of 10,000 segments takes, to tell 1,000 watchers of a change, and to answer among 10,000 connections. Exit
code 1 when a ratio to the wheel's server is on the wrong side of 1, or one of the lists takes a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from mooncake_v0.metadata.gateway_server import raise_file_limit
from mooncake_v0.metadata.registry import InstanceRecord, register
from mooncake_v0.metadata.store import open_store
from tests.servers import Server, free_ports, start_wheel_server

CONNECTIONS = (1, 32, 256)
REQUESTS = 8000
SEGMENTS = 10_000
LIST_LIMIT_S = 1.0
LIST_RUNS = 5
WATCHERS = 1000
CONNECTIONS_AT_ONCE = 10_000
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
VALUE = json.dumps(
    {
        "buffers": [{"addr": 140000000000000 + i, "length": 1 << 30, "name": "10.0.0.7:13003"} for i in range(3)],
        "name": "10.0.0.7:13003",
        "protocol": "tcp",
        "timestamp": "2026-01-01 00:00:00.000000",
    }
).encode()


@dataclass(frozen=True)
class Measured:
    """One run of one method. per_core_s: requests per second of the server's processor time, whatever else runs here."""

    per_s: float
    per_core_s: float
    p99_ms: float


def cpu_s(server: Server) -> float:
    """Processor time of all threads of a server so far."""
    assert server.process is not None
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


async def measure(server: Server, method: str, connections: int) -> Measured:
    """REQUESTS requests over kept connections, each waiting for its answer."""
    seconds: list[float] = []

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for i in range(REQUESTS // connections):
            key = f"mooncake%2Fram%2F127.0.0.7%3A{10000 + (number * 7919 + i) % 1000}"
            head = f"{method} /metadata?key={key} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n"
            body = VALUE if method == "PUT" else b""
            if body:
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            started = time.perf_counter()
            writer.write(head.encode() + b"\r\n" + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer[9:12] == b"200", answer
            await reader.readexactly(int(answer.split(b"content-length:")[1].split(b"\r\n")[0]))
            seconds.append(time.perf_counter() - started)
        writer.close()

    started, cpu_before_s = time.perf_counter(), cpu_s(server)
    await asyncio.gather(*(one(number) for number in range(connections)))
    took_s, core_s = time.perf_counter() - started, cpu_s(server) - cpu_before_s
    return Measured(len(seconds) / took_s, len(seconds) / core_s, 1000 * sorted(seconds)[int(len(seconds) * 0.99)])


def start_gateway(folder: Path) -> Server:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "mooncake_v0", "metadata", "serve", "--port", str(port)]
    return Server(command, port, f"http://127.0.0.1:{port}/metadata", folder).start()


def compare(ours: Server, wheel: Server, rounds: int) -> bool:
    """Print the table; whether every ratio is on the right side.

    Rates of processor time are the medians of the rounds; p99 and rates by the clock are those of the least disturbed.
    """
    is_good = True
    print(
        f"{'':10}{'per core-s: ours':>17}{'wheel':>8}{'ratio':>7}{'p99 ms: ours':>14}{'wheel':>8}{'ratio':>7}{'wall/s':>8}"
    )
    for connections in CONNECTIONS:
        for method in ("PUT", "GET"):
            runs: tuple[list[Measured], list[Measured]] = ([], [])
            for _ in range(rounds):
                for server, found in zip((ours, wheel), runs):
                    found.append(asyncio.run(measure(server, method, connections)))
            rates = [statistics.median(m.per_core_s for m in found) for found in runs]
            p99s = [min(m.p99_ms for m in found) for found in runs]
            walls = [max(m.per_s for m in found) for found in runs]
            is_good = is_good and rates[0] >= rates[1] and walls[0] >= walls[1] and p99s[0] < p99s[1]
            print(
                f"{method} x{connections:<5}{rates[0]:17.0f}{rates[1]:8.0f}{rates[0] / rates[1]:7.2f}"
                f"{p99s[0]:14.2f}{p99s[1]:8.2f}{p99s[0] / p99s[1]:7.2f}{walls[0] / walls[1]:8.2f}"
            )
    return is_good


def list_many(ours: Server) -> bool:
    """`metadata ls` of SEGMENTS segments, as the stock engine publishes them, then with our agents' records besides.

    Whether each way to call it takes under LIST_LIMIT_S, the best of LIST_RUNS: by the clock, and in brackets, which
    decides, without the time in which others kept it from a processor.
    """
    store = open_store(ours.url)
    for entry in store.list(""):
        store.delete(entry.key)
    names = [f"127.{i >> 14 & 127}.{i >> 7 & 127}.{1 + (i & 127)}" for i in range(SEGMENTS)]
    for host in names:
        store.put(f"mooncake/ram/{host}:13003", VALUE)
        meta = {"ip_or_host_name": host, "rpc_port": 13003}
        store.put(f"mooncake/rpc_meta/{host}:13003", json.dumps(meta).encode())
    is_good = _list(ours, "of the engine's two keys")
    for number, host in enumerate(names):
        register(store, _record(number, host))
    store.close()
    return _list(ours, "with our agents' records") and is_good


def _record(number: int, host: str) -> InstanceRecord:
    """Of an agent on this host, so that what is found at its port decides about it."""
    return InstanceRecord(
        segment=f"{host}:13003",
        role=("prefill", "decode")[number % 2],
        rank=number % 16,
        host=host,
        handshake_port=13003,
        data_port=13004,
        side_channel_port=13035,
        protocol="tcp",
        pid=1000 + number,
        hostname=socket.gethostname(),
        epoch=f"{number:016x}",
        started_at=1.7e9,
        refreshed_at=1.7e9,
        deployment=f"{number // 2:016x}",
        api_url=f"http://{host}:8100",
    )


def _list(ours: Server, kind: str) -> bool:
    ways = {"--no-probe": "without probes", "": "with probes", "--format json": "with probes as JSON"}
    command = [sys.executable, "-m", "mooncake_v0", "metadata", "ls", ours.url]
    is_good, told = True, []
    for flags, way in ways.items():
        runs = [_timed(command + flags.split(), ours) for _ in range(LIST_RUNS)]
        took_s, alone_s = min(run[0] for run in runs), min(run[1] for run in runs)
        told.append(f"{way} {took_s:.2f} s ({alone_s:.2f})")
        is_whole = all(_names_listed(printed) == SEGMENTS for _, _, printed in runs)
        is_good = is_good and is_whole and alone_s < LIST_LIMIT_S
    print(f"`metadata ls` of {SEGMENTS} segments, {kind}: {'; '.join(told)}")
    return is_good


def _timed(command: list[str], server: Server) -> tuple[float, float, str]:
    """Seconds by the clock, about those that it would have taken alone on this machine, and what was printed."""
    started, waited_s = time.perf_counter(), _waited_s()
    cpu_before_s = cpu_s(server) + _children_cpu_s()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    took_s = time.perf_counter() - started
    core_s = cpu_s(server) + _children_cpu_s() - cpu_before_s
    # others may have waited while this ran, so processor time is the least that it took
    return took_s, max(core_s, took_s - (_waited_s() - waited_s)), done.stdout


def _waited_s() -> float:
    """How long any process of this machine waited for a processor; 0 where the kernel does not say."""
    pressure = Path("/proc/pressure/cpu")
    return int(pressure.read_text().split("total=")[1].split()[0]) / 1e6 if pressure.exists() else 0.0


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _names_listed(printed: str) -> int:
    """How many segments a table, or JSON, names."""
    is_json = printed.startswith("{")
    return len(json.loads(printed)["segments"]) if is_json else len(set(re.findall(r"(?m)^127\.\S+:13003 ", printed)))


async def connect_many(ours: Server) -> bool:
    """CONNECTIONS_AT_ONCE open connections, a third of them silent, a third cut in the middle of a request."""
    started = time.perf_counter()
    opened = []
    for i in range(CONNECTIONS_AT_ONCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
        writer.write((b"", b"PUT /metadata?key=cut HTTP/1.1\r\nContent-Le", GET_HEALTH)[i % 3])
        opened.append((reader, writer))
    answers = await asyncio.wait_for(asyncio.gather(*(r.readline() for r, _ in opened[2::3])), 60)
    took_s = time.perf_counter() - started
    for _, writer in opened:
        writer.close()
    store = open_store(ours.url)
    store.put("after", b"1")
    is_good = store.get("after") == b"1" and store.get("cut") is None and all(b" 200 " in a for a in answers)
    store.close()
    print(f"{len(opened)} connections at once, {len(answers)} of them asked and were answered, in {took_s:.1f} s")
    return is_good


async def watch_many(ours: Server) -> bool:
    """WATCHERS open watches; all of them see one change."""

    async def open_watch() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", ours.port)
        writer.write(b"GET /metadata/watch?prefix=watched HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await reader.readuntil(b"\n\r\n")  # the first, empty line: the watch has begun
        return reader, writer  # a writer that is dropped closes its connection

    watches = [await open_watch() for _ in range(WATCHERS)]
    store = open_store(ours.url)
    started = time.perf_counter()
    await asyncio.to_thread(store.put, "watched/key", b"1")
    seen = await asyncio.wait_for(asyncio.gather(*(reader.readuntil(b"}\n") for reader, _ in watches)), 30)
    print(f"{len(seen)} watchers told in {time.perf_counter() - started:.3f} s")
    store.close()
    for _, writer in watches:
        writer.close()
    return all(b'"watched/key"' in line for line in seen)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    raise_file_limit()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        os.sched_setaffinity(0, cores[:1])  # the servers inherit it
        servers = [start_gateway(Path(name)), start_wheel_server(Path(name))]
        os.sched_setaffinity(0, cores[1:] or cores)
        try:
            results = [compare(servers[0], servers[1], rounds), list_many(servers[0])]
            results.append(asyncio.run(watch_many(servers[0])))
            results.append(asyncio.run(connect_many(servers[0])))
        finally:
            for server in servers:
                server.stop()
    print("good" if all(results) else "NOT good")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
