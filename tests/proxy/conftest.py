"""A proxy served by Hypercorn on a free port, in the test's own event loop, in front of backends that the test rules."""

from __future__ import annotations

import asyncio
import io
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any, AsyncIterator, Awaitable, Callable, Optional

import aiohttp
import pytest
from hypercorn.asyncio import serve

from mooncake_v0.proxy.access_log import AccessLog
from mooncake_v0.proxy.admin import build_admin_app
from mooncake_v0.proxy.app import build_app
from mooncake_v0.proxy.core import Proxy, Sources
from mooncake_v0.proxy.server import Bind, Listener
from mooncake_v0.proxy.settings import Health, PairSpec, ProxySettings, Timeouts
from tests.proxy.backend import Backend, Behaviour, agent_metrics, like_vllm

# patient where a busy machine would otherwise look like a fault, quick where nothing but waiting would be lost
PATIENT = ProxySettings(
    timeouts=Timeouts(
        connect_s=10.0,
        prefill_s=30.0,
        decode_first_byte_s=30.0,
        decode_idle_s=30.0,
        decode_json_s=30.0,
        client_stall_s=30.0,
        wedge_s=60.0,
    ),
    health=Health(probe_s=0.1, probe_down_s=0.05, probe_timeout_s=10.0),
)
HURRIED = replace(
    PATIENT.timeouts, prefill_s=1.0, prefill_s_per_1k_tokens=0.0, decode_first_byte_s=1.0, decode_json_s=1.0
)


@dataclass
class Pair:
    prefill: Backend
    decode: Backend


@dataclass
class Running:
    """A proxy that serves, its pairs, and a client session."""

    url: str
    admin_url: str
    proxy: Proxy
    pairs: list[Pair]
    client: aiohttp.ClientSession
    log: io.StringIO = field(default_factory=io.StringIO)

    @property
    def prefill(self) -> Backend:
        return self.pairs[0].prefill

    @property
    def decode(self) -> Backend:
        return self.pairs[0].decode

    async def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, dict[str, str], bytes]:
        """Send a JSON body; the answer's status, headers (names in lower case) and bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **options.pop("headers", {})}
        # in pieces: the client library warns of large bodies given whole
        async with self.client.post(self.url + path, data=io.BytesIO(data), headers=headers, **options) as response:
            return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read()

    async def until_up(self) -> None:
        await eventually(lambda: all(i.state == "up" for p in self.proxy.balancer.pairs.values() for i in p.instances))

    def log_lines(self) -> list[dict[str, Any]]:
        self.proxy.access_log.flush_now()
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


async def eventually(holds: Callable[[], bool], within_s: float = 10.0) -> float:
    """Wait until a condition holds; seconds that it took. Fails after the deadline."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < within_s, "did not happen in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


StartProxy = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_proxy() -> AsyncIterator[StartProxy]:
    """Start backends and a proxy: `await start_proxy(pairs=1, settings=PATIENT, prefill=..., decode=...)`."""
    stop = asyncio.Event()
    backends: list[Backend] = []
    servers: list[asyncio.Task[None]] = []
    sessions: list[aiohttp.ClientSession] = []

    async def start(
        pairs: int = 1,
        settings: ProxySettings = PATIENT,
        prefill: Behaviour = like_vllm,
        decode: Behaviour = like_vllm,
        sources: Optional[Sources] = None,
        wait: bool = True,
        early: bool = False,
        **changes: Any,
    ) -> Running:
        made = [Pair(await Backend(prefill).start(), await Backend(decode).start()) for _ in range(pairs)]
        for number, pair in enumerate(made if early else []):
            epochs = (f"{number:02x}aa", f"{number:02x}bb")
            pair.prefill.metrics, pair.decode.metrics = agent_metrics(*epochs), agent_metrics(*reversed(epochs))
        backends.extend(one for pair in made for one in (pair.prefill, pair.decode))
        specs = tuple(PairSpec(f"pair-{i}", pair.prefill.url, pair.decode.url) for i, pair in enumerate(made))
        log = io.StringIO()
        proxy = Proxy(replace(settings, **changes), sources or Sources(pairs=specs), AccessLog(log))
        urls = []
        for app in (build_app(proxy), build_admin_app(proxy)):
            listener = Listener(Bind("127.0.0.1", 0))
            urls.append(listener.url)
            servers.append(asyncio.ensure_future(serve(app, listener.config(0.2), shutdown_trigger=stop.wait)))
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        sessions.append(session)
        running = Running(urls[0], urls[1], proxy, made, session, log)
        await eventually(lambda: proxy.relay is not None)
        if wait:
            await running.until_up()
        if early:
            await eventually(lambda: all(pair.hands_off_early for pair in proxy.balancer.pairs.values()))
        return running

    yield start
    stop.set()
    for session in sessions:
        await session.close()
    await asyncio.gather(*servers)
    for backend in backends:
        await backend.stop()
