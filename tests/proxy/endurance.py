"""Long measurements of a running proxy, too long for the test suite. Each prints one JSON object and fails by exit code.

python -m tests.proxy.endurance streams --seconds 600      1,000 streams at once, again and again: errors, memory,
                                                           descriptors
python -m tests.proxy.endurance overload --seconds 20      ten times what the instances can do
python -m tests.proxy.endurance pacing                     64 streams of 50 tokens/s: what the proxy adds
python -m tests.proxy.endurance rolling --restarts 20      restarts under load, on one socket
python -m tests.proxy.endurance long-stream --seconds 75   one stream longer than a minute
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Awaitable

import aiohttp
import click

from tests.freezing import freeze, thaw
from tests.proxy.command import Command, running_command, start_command
from tests.proxy.load import Outcome, percentile, quick_backend, run_clients
from tests.proxy.versus_published import free_port, wait_for_port

MIB = 1024 * 1024
QUIET = ("--port", "0", "--access-log", "none", "--drain-delay", "0")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def summary(outcome: Outcome) -> dict[str, Any]:
    return {
        "statuses": outcome.statuses,
        "errors": outcome.codes,
        "broken": outcome.broken,
        "requests_per_s": round(len(outcome.latencies_s) / outcome.wall_s, 1),
        "p50_ms": round(percentile(outcome.latencies_s, 0.5) * 1000, 2),
        "p99_ms": round(percentile(outcome.latencies_s, 0.99) * 1000, 2),
    }


async def pair_arguments(**backend: float) -> list[str]:
    urls = [(await quick_backend(**backend))[1] for _ in range(2)]
    return ["--prefill", urls[0], "--decode", urls[1], *QUIET]


async def until_ready(command: Command) -> None:
    port = int(command.url.rsplit(":", 1)[1])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        ready = b" 200 " in await reader.readline()
        writer.close()
        if ready:
            return
        await asyncio.sleep(0.1)
    raise TimeoutError("the proxy did not become ready")


async def streams(seconds: float, clients: int) -> dict[str, Any]:
    """Memory and descriptors at the end against those after the first tenth, with `clients` streams all the time."""
    arguments = await pair_arguments(events=60, pause_s=0.5)
    arguments += ["--max-requests-per-pair", str(2 * clients), "--max-prefills-per-pair", str(clients)]
    samples: list[tuple[float, int, int]] = []
    async with running_command(*arguments) as command:
        await until_ready(command)
        pid = command.process.pid
        idle = (resident_bytes(pid), descriptors(pid))
        load = asyncio.ensure_future(
            run_clients(command.url, clients=clients, requests=0, stream=True, prompt_bytes=512, seconds=seconds)
        )
        start_s = time.monotonic()
        while not load.done():
            await asyncio.wait([load], timeout=5)
            samples.append((time.monotonic() - start_s, resident_bytes(pid), descriptors(pid)))
        outcome = await load
        await asyncio.sleep(12)  # longer than connections to instances are kept
        after = (resident_bytes(pid), descriptors(pid))
    warm = [one for one in samples if one[0] > min(30.0, seconds * 0.2)]
    growth = warm[-2][1] - warm[0][1]
    good = outcome.broken == 0 and set(outcome.statuses) == {200} and not outcome.codes and after[1] <= idle[1] + 5
    return {
        "good": good and growth < 16 * MIB,
        **summary(outcome),
        "streams": clients,
        "seconds": seconds,
        "resident_mib": {
            "idle": idle[0] // MIB,
            "warm": warm[0][1] // MIB,
            "end": warm[-2][1] // MIB,
            "most": max(one[1] for one in samples) // MIB,
        },
        "descriptors": {"idle": idle[1], "most": max(one[2] for one in samples), "after": after[1]},
    }


async def overload(seconds: float) -> dict[str, Any]:
    """Instances that hold 8 requests of 200 ms: 40 a second; ten times as many come, whatever becomes of them."""
    places, service_s = 8, 0.1
    arguments = await pair_arguments(service_s=service_s)
    # prefill and decode each take service_s
    capacity = places / (2 * service_s)
    arguments += ["--max-requests-per-pair", str(places), "--queue", str(places)]
    async with running_command(*arguments) as command:
        await until_ready(command)
        before = resident_bytes(command.process.pid)
        alone = await run_clients(command.url, clients=places, requests=0, seconds=seconds / 4)
        outcome = await flood(command.url, rate=10 * capacity, seconds=seconds)
        grown = resident_bytes(command.process.pid) - before
    goodput = len(outcome.latencies_s) / outcome.wall_s
    reached = len(alone.latencies_s) / alone.wall_s
    refusal_ms = percentile(outcome.refusal_latencies_s, 0.5) * 1000
    return {
        "good": goodput >= 0.95 * reached and refusal_ms < 5 and set(outcome.statuses) <= {200, 429, 503},
        **summary(outcome),
        "capacity_per_s": capacity,
        "alone_per_s": round(reached, 1),
        "goodput_over_alone": round(goodput / reached, 3),
        "refusal_p50_ms": round(refusal_ms, 2),
        "refusal_p99_ms": round(percentile(outcome.refusal_latencies_s, 0.99) * 1000, 2),
        "grown_mib": grown // MIB,
    }


async def flood(url: str, *, rate: float, seconds: float) -> Outcome:
    """Requests at a fixed rate, whatever becomes of them, over connections that are reused when free."""
    from tests.proxy.load import Client, request_bytes

    outcome = Outcome()
    port = int(url.rsplit(":", 1)[1])
    request = request_bytes(False, 2048)
    idle: list[Client] = []
    loop = asyncio.get_running_loop()

    async def one() -> None:
        connection = idle.pop() if idle else (await loop.create_connection(Client, "127.0.0.1", port))[1]
        before_s = time.monotonic()
        try:
            status = await connection.ask(request)
        except ConnectionResetError:
            outcome.broken += 1
            return
        outcome.count(status, time.monotonic() - before_s)
        idle.append(connection)

    start_s = time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    sent = 0
    while time.monotonic() - start_s < seconds:
        while sent < (time.monotonic() - start_s) * rate:
            sent += 1
            task = asyncio.ensure_future(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.005)
    outcome.wall_s = time.monotonic() - start_s
    await asyncio.gather(*tasks)
    return outcome


async def pacing(rounds: int) -> dict[str, Any]:
    """End-to-end time of 64 streams of 64 tokens at 50 a second, direct and through the proxy, in turn."""
    urls = [(await quick_backend(events=64, pause_s=0.02))[1] for _ in range(2)]
    async with running_command("--prefill", urls[0], "--decode", urls[1], *QUIET) as command:
        await until_ready(command)
        seen: dict[str, list[float]] = {"direct": [], "proxy": []}
        for _ in range(rounds):
            for name, url in (("direct", urls[1]), ("proxy", command.url)):
                outcome = await run_clients(url, clients=64, requests=64, stream=True)
                seen[name].append(percentile(outcome.latencies_s, 0.5))
        resident = resident_bytes(command.process.pid)
    direct, proxy = (sorted(seen[name])[rounds // 2] for name in ("direct", "proxy"))
    return {
        "good": proxy / direct <= 1.025,
        "direct_p50_ms": round(direct * 1000, 1),
        "proxy_p50_ms": round(proxy * 1000, 1),
        "proxy_over_direct": round(proxy / direct, 4),
        "resident_mib": resident // MIB,
    }


async def rolling(restarts: int) -> dict[str, Any]:
    """Each new proxy takes over the listening socket of the one before, which then gets SIGTERM."""
    urls = [(await quick_backend(events=20, pause_s=0.02))[1] for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as shared:
        url = f"http://127.0.0.1:{shared.getsockname()[1]}"
        arguments = ["--prefill", urls[0], "--decode", urls[1], "--listen-fd", str(shared.fileno())]
        arguments += ["--access-log", "none", "--drain-delay", "1"]
        current = await start_command(arguments, pass_fds=[shared.fileno()])
        await asyncio.sleep(1)
        total = Outcome()
        codes = []
        for _ in range(restarts):
            load = asyncio.ensure_future(run_clients(url, clients=50, requests=0, stream=True, seconds=3))
            plain = asyncio.ensure_future(run_clients(url, clients=10, requests=0, seconds=3))
            await asyncio.sleep(0.5)
            successor = await start_command(arguments, pass_fds=[shared.fileno()])
            await asyncio.sleep(0.7)
            current.process.send_signal(signal.SIGTERM)
            codes.append(await current.end())
            current = successor
            for outcome in await asyncio.gather(load, plain):
                total.broken += outcome.broken
                for status, count in outcome.statuses.items():
                    total.statuses[status] = total.statuses.get(status, 0) + count
        current.process.kill()
        await current.process.wait()
    good = total.broken == 0 and set(total.statuses) == {200} and set(codes) == {0}
    return {"good": good, "restarts": restarts, "statuses": total.statuses, "broken": total.broken}


async def long_stream(seconds: float) -> dict[str, Any]:
    """One stream of one event a second."""
    arguments = await pair_arguments(events=int(seconds), pause_s=1.0)
    async with running_command(*arguments) as command:
        await until_ready(command)
        outcome = await run_clients(command.url, clients=1, requests=1, stream=True)
    return {"good": outcome.statuses == {200: 1} and outcome.wall_s >= seconds - 1, "seconds": round(outcome.wall_s, 1)}


class BackendProcess:
    """An instance that is a process, so that it can be killed and stopped for real."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "tests.proxy.load", str(self.port)])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        freeze(self.process.pid)

    def thaw(self) -> None:
        thaw(self.process.pid)


async def until_state(command: Command, pair: int, role: str, usable: bool, within_s: float = 20) -> float:
    """Seconds until the proxy calls an instance up, or no longer up."""
    start_s = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while time.monotonic() - start_s < within_s:
            async with session.get(command.admin_url + "/pairs") as response:
                pairs = (await response.json())["pairs"]
            if (pairs[pair][role]["state"] == "up") is usable:
                return time.monotonic() - start_s
            await asyncio.sleep(0.02)
    raise TimeoutError(f"{role} of pair {pair} did not become {'usable' if usable else 'unusable'}")


async def faults() -> dict[str, Any]:
    """Every instance of two pairs in turn is killed and started again, and frozen and thawed, under load."""
    ports = [free_port() for _ in range(4)]
    processes = [BackendProcess(port) for port in ports]
    arguments = [f"--pair=http://127.0.0.1:{ports[i]},http://127.0.0.1:{ports[i + 1]}" for i in (0, 2)]
    seen: dict[str, Any] = {}
    good = True
    try:
        async with running_command(*arguments, *QUIET, "--admin-port", "0") as command:
            for pair in (0, 1):
                for role in ("prefill", "decode"):
                    await until_state(command, pair, role, True)
            for number, process in enumerate(processes):
                pair, role = number // 2, ("prefill", "decode")[number % 2]
                for fault in ("killed", "frozen"):
                    outcome, found_s, back_s = await one_fault(command, process, pair, role, fault)
                    good = good and outcome.broken == 0 and set(outcome.statuses) == {200} and back_s < 1.0
                    seen[f"{role} of pair {pair} {fault}"] = {
                        "statuses": outcome.statuses,
                        "broken": outcome.broken,
                        "found_out_after_s": round(found_s, 2),
                        "used_again_after_s": round(back_s, 2),
                        "slowest_answer_s": round(max(outcome.latencies_s), 2),
                    }
    finally:
        for process in processes:
            process.kill()
    return {"good": good, **seen}


async def one_fault(
    command: Command, process: BackendProcess, pair: int, role: str, fault: str
) -> tuple[Outcome, float, float]:
    """Load of 16 clients for 8 s; the fault comes after one second and goes after five."""
    load = asyncio.ensure_future(run_clients(command.url, clients=16, requests=0, prompt_bytes=512, seconds=8))
    await asyncio.sleep(1)
    process.kill() if fault == "killed" else process.freeze()
    found_s = await until_state(command, pair, role, False)
    await asyncio.sleep(3)
    if fault == "killed":
        process.start()
        await wait_for_port(process.port)
    else:
        process.thaw()
    back_s = await until_state(command, pair, role, True)
    return await load, found_s, back_s


def finish(work: Awaitable[dict[str, Any]]) -> None:
    """Run, print, and fail by exit code."""

    async def run() -> dict[str, Any]:
        return await work

    result = asyncio.run(run())
    print(json.dumps(result, indent=1))
    raise SystemExit(0 if result["good"] else 1)


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("streams")
@click.option("--seconds", default=600.0)
@click.option("--clients", default=1000)
def streams_command(seconds: float, clients: int) -> None:
    finish(streams(seconds, clients))


@main.command("overload")
@click.option("--seconds", default=20.0)
def overload_command(seconds: float) -> None:
    finish(overload(seconds))


@main.command("pacing")
@click.option("--rounds", default=5)
def pacing_command(rounds: int) -> None:
    finish(pacing(rounds))


@main.command("rolling")
@click.option("--restarts", default=20)
def rolling_command(restarts: int) -> None:
    finish(rolling(restarts))


@main.command("faults")
def faults_command() -> None:
    finish(faults())


@main.command("long-stream")
@click.option("--seconds", default=75.0)
def long_stream_command(seconds: float) -> None:
    finish(long_stream(seconds))


if __name__ == "__main__":
    main()
