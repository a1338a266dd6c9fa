"""The command itself: what it says to wrong arguments, signals, files that change, TLS."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import time
from pathlib import Path
from typing import AsyncIterator

import aiohttp
import pytest

from tests.proxy.backend import Backend, events
from tests.proxy.command import running_command, start_command
from tests.proxy.conftest import eventually
from tests.servers import make_certificates

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
QUIET = ("--port", "0", "--access-log", "none", "--drain-delay", "0")


@pytest.fixture
async def backends() -> AsyncIterator[list[Backend]]:
    """Four instances: two pairs."""
    started = [await Backend().start() for _ in range(4)]
    yield started
    for one in started:
        await one.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def post(client: aiohttp.ClientSession, url: str, body: dict[str, object] = BODY) -> tuple[int, bytes]:
    async with client.post(url + "/v1/completions", json=body) as response:
        return response.status, await response.read()


async def until_ready(client: aiohttp.ClientSession, url: str) -> None:
    deadline = time.monotonic() + 10
    while True:
        async with client.get(url + "/health") as response:
            if response.status == 200:
                return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "name the instances in one way"),
        (["--prefill", "http://a:1"], 2, "go together"),
        (["--pair", "http://a:1"], 2, "is not PREFILL_URL,DECODE_URL"),
        (["--pair", "http://a:1,ftp://b:2"], 1, "is not an http or https URL"),
        (["--pair", "http://a:1,http://a:1"], 1, "for both prefill and decode"),
        (["--pair", "http://a:99999,http://b:1"], 1, "is not a URL"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--pair", "http://a:1,http://b:1"], 2, "in one way"),
        (["--pairs", "/nowhere/pairs.toml"], 2, "does not exist"),
        (["--discover", "ftp://x"], 1, "ftp"),
        (["--pair", "http://a:1,http://b:1", "--admin-port", "0", "--admin-host", "0.0.0.0"], 2, "--admin-key-file"),
        (["--pair", "http://a:1,http://b:1", "--ssl-keyfile", __file__], 2, "needs --ssl-certfile"),
        (["--pair", "http://a:1,http://b:1", "--ssl-certfile", __file__], 1, "cannot use the certificate"),
        (["--pair", "http://a:1,http://b:1", "--listen-fd", "77"], 1, "descriptor 77 is not a listening socket"),
    ],
)
async def test_wrong_arguments_are_told_in_one_message(arguments: list[str], code: int, said: str) -> None:
    command = await start_command([*arguments, *QUIET])
    await command.rest()

    assert await command.end() == code
    assert said in command.stderr
    assert "Traceback" not in command.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pairs = 3", "is not a list of pairs"),
        ("[[pairs]]\nprefill = 'http://a:1'", "$.pairs[0].decode is missing"),
        ("[[pairs]]\nprefil = 'http://a:1'", "unknown key 'prefil'"),
        ("[[pairs", "pairs.toml"),
        ("", "is not a list of pairs"),
        ("[[pairs]]\nname='a'\nprefill='http://a:1'\ndecode='http://b:1'\n" * 2, "used twice"),
    ],
)
async def test_wrong_pair_file_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pairs.toml").write_text(text)

    command = await start_command(["--pairs", str(tmp_path / "pairs.toml"), *QUIET])
    await command.rest()

    assert await command.end() == 1
    assert said in command.stderr
    assert "fix:" in command.stderr
    assert "Traceback" not in command.stderr


async def test_port_in_use_is_told(backends: list[Backend]) -> None:
    pair = f"{backends[0].url},{backends[1].url}"

    command = await start_command(["--pair", pair, "--port", str(backends[0].port)])
    await command.rest()

    assert await command.end() == 1
    assert f"cannot listen on 127.0.0.1:{backends[0].port}" in command.stderr
    assert "Traceback" not in command.stderr


def pair_file(path: Path, *pairs: tuple[Backend, Backend]) -> None:
    rows = [f'[[pairs]]\nname = "{d.port}"\nprefill = "{p.url}"\ndecode = "{d.url}"\n' for p, d in pairs]
    path.write_text("\n".join(rows))


async def test_changed_pair_file_changes_the_pairs_and_a_broken_one_nothing(
    tmp_path: Path, backends: list[Backend], client: aiohttp.ClientSession
) -> None:
    a, b, c, d = backends
    path = tmp_path / "pairs.toml"
    pair_file(path, (a, b))
    b.behaviour = events(60, pause_s=0.05)
    async with running_command("--pairs", str(path), *QUIET) as command:
        await until_ready(client, command.url)
        streaming = asyncio.ensure_future(post(client, command.url, {**BODY, "stream": True}))
        await eventually(lambda: len(b.posts()) == 1)

        path.write_text("[[pairs")
        await asyncio.sleep(1.5)
        pair_file(path, (c, d))
        await eventually(lambda: "is gone from the source" in command.stderr)
        await until_ready(client, command.url)
        status, _ = await post(client, command.url)
        streamed = await streaming

        assert "pairs stay as they are" in command.stderr

    assert status == 200
    assert len(d.posts()) == 1
    assert streamed[0] == 200
    assert streamed[1].endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in streamed[1]


async def test_sigterm_lets_streams_end_and_takes_no_more(
    backends: list[Backend], client: aiohttp.ClientSession
) -> None:
    backends[1].behaviour = events(20, pause_s=0.05)
    async with running_command("--pair", f"{backends[0].url},{backends[1].url}", *QUIET) as command:
        await until_ready(client, command.url)
        streaming = asyncio.ensure_future(post(client, command.url, {**BODY, "stream": True}))
        await eventually(lambda: len(backends[1].posts()) == 1)

        command.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        with pytest.raises(aiohttp.ClientConnectionError):
            await post(client, command.url)
        status, body = await streaming

        assert await command.end() == 0
    assert status == 200
    assert body.count(b"data: ") == 21
    assert b'"error"' not in body


async def test_health_says_503_at_once_while_requests_are_still_served(
    backends: list[Backend], client: aiohttp.ClientSession
) -> None:
    arguments = ["--pair", f"{backends[0].url},{backends[1].url}", *QUIET, "--drain-delay", "1.5"]
    async with running_command(*arguments) as command:
        await until_ready(client, command.url)
        command.process.send_signal(signal.SIGTERM)
        await eventually(lambda: "shutting down" in command.stderr)

        async with client.get(command.url + "/health") as health:
            pass
        status, _ = await post(client, command.url)

        assert (health.status, status) == (503, 200)
        assert await command.end() == 0


async def test_stream_that_outlives_the_drain_time_ends_in_an_error_event(
    backends: list[Backend], client: aiohttp.ClientSession
) -> None:
    backends[1].behaviour = events(1000, pause_s=0.05)
    arguments = ["--pair", f"{backends[0].url},{backends[1].url}", *QUIET, "--drain", "0.5"]
    async with running_command(*arguments) as command:
        await until_ready(client, command.url)
        streaming = asyncio.ensure_future(post(client, command.url, {**BODY, "stream": True}))
        await eventually(lambda: len(backends[1].posts()) == 1)

        command.process.send_signal(signal.SIGTERM)
        _, body = await streaming

        assert await command.end() == 0
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"shutting_down" in body


async def test_successor_on_the_same_socket_takes_over_without_a_refused_connection(
    backends: list[Backend], client: aiohttp.ClientSession
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as shared:
        url = f"http://127.0.0.1:{shared.getsockname()[1]}"
        arguments = ["--pair", f"{backends[0].url},{backends[1].url}", "--listen-fd", str(shared.fileno())]
        arguments += ["--access-log", "none", "--drain-delay", "0.5"]
        statuses: list[int] = []
        stopped = asyncio.Event()

        async def load() -> None:
            while not stopped.is_set():
                statuses.append((await post(client, url))[0])

        async with running_command(*arguments, pass_fds=[shared.fileno()]) as first:
            await until_ready(client, url)
            clients = [asyncio.ensure_future(load()) for _ in range(4)]
            async with running_command(*arguments, pass_fds=[shared.fileno()]):
                await asyncio.sleep(0.5)
                first.process.send_signal(signal.SIGTERM)
                assert await first.end() == 0
                count = len(statuses)
                await eventually(lambda: len(statuses) > count + 20)
                stopped.set()
                await asyncio.gather(*clients)

    assert set(statuses) == {200}


async def test_connections_that_clients_closed_are_closed_here_too(
    backends: list[Backend], client: aiohttp.ClientSession
) -> None:
    async with running_command("--pair", f"{backends[0].url},{backends[1].url}", *QUIET) as command:
        await until_ready(client, command.url)
        folder = Path(f"/proc/{command.process.pid}/fd")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many:
            await asyncio.gather(*(post(many, command.url) for _ in range(100)))
            most = len(list(folder.iterdir()))

        await eventually(lambda: len(list(folder.iterdir())) < most - 90, 15)


async def test_https_is_served_and_asked_for(
    tmp_path: Path, backends: list[Backend], client: aiohttp.ClientSession
) -> None:
    certificates = make_certificates(tmp_path)
    cert, key = str(certificates.cert), str(certificates.key)
    trusted = ssl.create_default_context(cafile=str(certificates.ca))
    arguments = ["--pair", f"{backends[0].url},{backends[1].url}", *QUIET]
    async with running_command(*arguments, "--ssl-certfile", cert, "--ssl-keyfile", key) as inner:
        assert inner.url.startswith("https://")
        outer_pair = ["--pair", f"{backends[2].url},{inner.url}", "--upstream-ca-file", str(certificates.ca)]
        async with running_command(*outer_pair, *QUIET) as outer:
            await until_ready(client, outer.url)
            through_both = await post(client, outer.url)
        async with client.post(inner.url + "/v1/completions", json=BODY, ssl=trusted) as response:
            direct = response.status

    assert through_both[0] == direct == 200


async def test_ipv6_addresses_work_on_both_sides(client: aiohttp.ClientSession, backends: list[Backend]) -> None:
    arguments = ["--pair", f"{backends[0].url},{backends[1].url}", *QUIET, "--host", "::1"]
    async with running_command(*arguments) as inner:
        assert inner.url.startswith("http://[::1]:")
        async with running_command("--pair", f"{backends[2].url},{inner.url}", *QUIET) as outer:
            await until_ready(client, outer.url)
            status, _ = await post(client, outer.url)

    assert status == 200
