"""The HTTP metadata gateway: a listening socket, the connections on it, and one store behind them.

`mooncake-v0 metadata serve` runs `serve` in the foreground; `gateway` runs it in a thread. Life cycle: bind, answer, and on
stop: no new connections, open requests are finished (up to GRACE_S), watches end, the store is closed.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass, field
from typing import Callable

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata.gateway_auth import Access
from mooncake_v0.metadata.gateway_connection import Connection, Shared
from mooncake_v0.metadata.gateway_metrics import GatewayMetrics
from mooncake_v0.metadata.gateway_requests import GatewayRequests
from mooncake_v0.metadata.gateway_watches import WatchHub
from mooncake_v0.metadata.store import MetadataStore
from mooncake_v0.metadata.store_runner import StoreRunner

logger = logging.getLogger(__name__)

GRACE_S = 2.0
BACKLOG = 4096
FIRST_REQUEST_S = 20.0
CHECK_EVERY_S = 0.5


@dataclass(frozen=True)
class GatewayOptions:
    """How a gateway behaves; host and port are where it listens, port 0 picks one.

    default_ttl_s: keys put without a ttl of their own vanish after this long, None never
    stale_reads:   answer gets from memory while the store is down
    first_request_s: a connection without a complete request head by then is closed
    """

    host: str = "127.0.0.1"
    port: int = 0
    access: Access = field(default_factory=Access)
    default_ttl_s: float | None = None
    stale_reads: bool = False
    first_request_s: float = FIRST_REQUEST_S


class Gateway:
    """A listening gateway; used inside its event loop."""

    def __init__(self, store: MetadataStore, options: GatewayOptions) -> None:
        self._options = options
        self._runner = StoreRunner(store, stale_reads=options.stale_reads)
        metrics = GatewayMetrics()
        requests = GatewayRequests(
            self._runner, access=options.access, metrics=metrics, default_ttl_s=options.default_ttl_s
        )
        self._shared = Shared(requests, WatchHub(store), metrics, options.first_request_s)
        metrics.connections.set_function(lambda: len(self._shared.connections))
        self._listener: asyncio.AbstractServer | None = None
        self._checking: asyncio.TimerHandle | None = None
        self.port = options.port

    async def start(self) -> None:
        """Bind and listen. Raises MetadataError when the address cannot be bound."""
        options = self._options
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: Connection(self._shared), options.host, options.port, backlog=BACKLOG
            )
        except (OSError, OverflowError) as error:
            await self.stop()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MetadataError(
                f"cannot listen on {options.host}:{options.port}: {reason}", fix="choose another --host or --port, or 0"
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]
        self._check_times()

    @property
    def url(self) -> str:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"http://{host}:{self.port}/metadata"

    async def stop(self) -> None:
        """Finish what was asked, then close the connections and the store."""
        if self._listener is not None:
            self._listener.close()
        if self._checking is not None:
            self._checking.cancel()
        await self._shared.hub.close()
        connections = self._shared.connections
        for connection in list(connections):
            connection.stop()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + GRACE_S
        while connections and loop.time() < deadline_s:
            await asyncio.sleep(0.01)
        for connection in list(connections):
            connection.abort()
        await self._runner.close()

    def _check_times(self) -> None:
        for connection in list(self._shared.connections):
            connection.check_time()
        self._checking = asyncio.get_running_loop().call_later(CHECK_EVERY_S, self._check_times)


async def serve(
    store: MetadataStore, options: GatewayOptions, *, stop: asyncio.Event, ready: Callable[[str], None]
) -> None:
    """Run a gateway until `stop` is set; `ready` gets its URL once it listens."""
    gateway = Gateway(store, options)
    await gateway.start()
    ready(gateway.url)
    await stop.wait()
    await gateway.stop()


def raise_file_limit() -> None:
    """Let this process open as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
