"""The HTTP metadata gateway: sockets around `gateway_requests`, on aiohttp's low-level server.

`mooncake-v0 metadata serve` runs `serve` in the foreground; `gateway` runs it in a thread. Life cycle: bind, answer, and on
stop: no new connections, open requests are finished (up to GRACE_S), watches end, the store is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from dataclasses import dataclass, field
from typing import Callable

from aiohttp import web

from mooncake_v0.errors import MetadataError, MooncakeV0Error
from mooncake_v0.metadata.gateway_auth import Access
from mooncake_v0.metadata.gateway_metrics import GatewayMetrics
from mooncake_v0.metadata.gateway_requests import MAX_VALUE_BYTES, GatewayRequests, Reply, refusal
from mooncake_v0.metadata.gateway_watches import Subscription, WatchHub
from mooncake_v0.metadata.http_store import change_row
from mooncake_v0.metadata.store import Change, MetadataStore
from mooncake_v0.metadata.store_runner import StoreRunner

logger = logging.getLogger(__name__)

GRACE_S = 2.0
BACKLOG = 4096
WATCH_SIGN_OF_LIFE_S = 15.0
READ_BODY_TIMEOUT_S = 10.0
FIRST_REQUEST_S = 20.0


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
        self._metrics = GatewayMetrics()
        self._runner = StoreRunner(store, stale_reads=options.stale_reads)
        self._hub = WatchHub(store)
        self._requests = GatewayRequests(
            self._runner, access=options.access, metrics=self._metrics, default_ttl_s=options.default_ttl_s
        )
        self._server = web.Server(self._handle, access_log=None, tcp_keepalive=True)
        self._silent: dict[object, asyncio.TimerHandle] = {}
        self._listener: asyncio.AbstractServer | None = None
        self.port = options.port

    async def start(self) -> None:
        """Bind and listen. Raises MetadataError when the address cannot be bound."""
        options = self._options
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._connection, options.host, options.port, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            await self.stop()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MetadataError(
                f"cannot listen on {options.host}:{options.port}: {reason}", fix="choose another --host or --port, or 0"
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"http://{host}:{self.port}/metadata"

    async def stop(self) -> None:
        """Finish what was asked, then close the connections and the store."""
        if self._listener is not None:
            self._listener.close()
        await self._hub.close()
        self._server.pre_shutdown()
        await self._server.shutdown(GRACE_S)
        for timer in self._silent.values():
            timer.cancel()
        await self._runner.close()

    def _connection(self) -> asyncio.Protocol:
        """The protocol object of a new connection, closed when its first request does not come in time."""
        connection = self._server()
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(self._options.first_request_s, self._close_silent, connection)
        return connection

    def _close_silent(self, connection: web.RequestHandler) -> None:
        self._silent.pop(connection, None)
        connection.force_close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        started = time.perf_counter()
        timer = self._silent.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        reply = await self._read_and_answer(request)
        if reply.watch_prefix is not None:
            return await self._stream(request, reply.watch_prefix)
        self._metrics.count(request.method, reply.status, time.perf_counter() - started)
        headers = {**reply.headers, "Content-Type": reply.content_type}
        return web.Response(body=reply.body, status=reply.status, headers=headers)

    async def _read_and_answer(self, request: web.BaseRequest) -> Reply:
        body = b""
        if request.body_exists:
            try:
                reading = self._read_body(request)
                # what has arrived whole, as nearly always, needs no timer
                is_whole = request.content.is_eof()
                body = await (reading if is_whole else asyncio.wait_for(reading, READ_BODY_TIMEOUT_S))
            except ValueError:
                return refusal(
                    413, f"the value is over {MAX_VALUE_BYTES} bytes", "register fewer regions, or larger ones"
                )
            except asyncio.TimeoutError:
                return refusal(408, "the body did not arrive in time", "send it whole")
        headers = request.headers
        return await self._requests.answer(
            request.method, request.raw_path, headers.get("Authorization"), headers.get("If-Match"), body
        )

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        if (request.content_length or 0) > MAX_VALUE_BYTES:
            raise ValueError
        chunks, size = [], 0
        async for chunk in request.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_VALUE_BYTES:
                raise ValueError
        return b"".join(chunks)

    async def _stream(self, request: web.BaseRequest, prefix: str) -> web.StreamResponse:
        try:
            subscription = await self._hub.subscribe(prefix)
        except MooncakeV0Error as error:
            reply = refusal(503, error.what, error.fix)
            return web.Response(body=reply.body, status=reply.status, content_type=reply.content_type)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        self._metrics.watchers.inc()
        try:
            await response.prepare(request)
            await response.write(b"\n")
            await self._send_changes(response, subscription)
        except ConnectionError:
            logger.debug("a watching client has gone")
        finally:
            self._metrics.watchers.dec()
            self._hub.unsubscribe(subscription)
        return response

    async def _send_changes(self, response: web.StreamResponse, subscription: Subscription) -> None:
        while True:
            try:
                item = await asyncio.wait_for(subscription.queue.get(), WATCH_SIGN_OF_LIFE_S)
            except asyncio.TimeoutError:
                await response.write(b"\n")
                continue
            if not isinstance(item, Change):
                return
            await response.write(json.dumps(change_row(item)).encode() + b"\n")


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
