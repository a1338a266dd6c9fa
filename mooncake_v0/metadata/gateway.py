"""The HTTP metadata gateway: what the pinned engine speaks, over any store.

Two callers: `mooncake-v0 metadata serve` runs `serve` in the foreground; a transfer agent calls `start_gateway_thread`
for a private gateway on loopback when its mooncake.json names a store that the engine cannot speak to itself (redis, an
etcd cluster, credentials). Life cycle: bind, answer, and on stop: no new connections, open requests are finished (up to
GRACE_S), watches end, the store is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import secrets
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Callable

from aiohttp import web

from mooncake_v0.errors import MetadataError, MooncakeV0Error
from mooncake_v0.metadata.gateway_auth import Access, token_access
from mooncake_v0.metadata.gateway_metrics import GatewayMetrics
from mooncake_v0.metadata.gateway_requests import MAX_VALUE_BYTES, GatewayRequests, Reply, refusal
from mooncake_v0.metadata.gateway_watches import Subscription, WatchHub
from mooncake_v0.metadata.http_store import change_row
from mooncake_v0.metadata.store import DEFAULT_TIMEOUT_S, Change, MetadataStore, open_store
from mooncake_v0.metadata.store_runner import StoreRunner

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8080
GRACE_S = 2.0
BACKLOG = 4096
WATCH_SIGN_OF_LIFE_S = 15.0
READ_BODY_TIMEOUT_S = 10.0
FIRST_REQUEST_S = 20.0
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0


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


class GatewayThread:
    """A gateway in a daemon thread of this process.

    url: what the engine takes as metadata server, with the private login in it; never log it, log `masked_url`.
    """

    def __init__(
        self, masked_url: str, loop: asyncio.AbstractEventLoop, stop: asyncio.Event, thread: threading.Thread
    ) -> None:
        self.url = masked_url
        self.masked_url = masked_url
        self._loop = loop
        self._stop = stop
        self._thread = thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop and wait for it; may be called twice."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_TIMEOUT_S)


def start_gateway_thread(
    store_url: str,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    is_private: bool = True,
    stale_reads: bool = True,
) -> GatewayThread:
    """Start a gateway over a store and return when it listens.

    is_private: only who has the handle's url, which holds a random login, can read or write; the engine sends it as
    HTTP Basic. The caller sets NO_PROXY for 127.0.0.1 before the engine starts: libcurl honours http_proxy.

    Raises MetadataError for a bad store URL or an address that cannot be bound. A store that is down is no error here.
    """
    token = secrets.token_urlsafe(24)
    options = GatewayOptions(
        host, port, access=token_access(token) if is_private else Access(), stale_reads=stale_reads
    )
    gateway = gateway_in_thread(open_store(store_url, timeout_s=timeout_s), options)
    if is_private:
        gateway.url = gateway.masked_url.replace("://", f"://agent:{token}@", 1)
    return gateway


def gateway_in_thread(store: MetadataStore, options: GatewayOptions) -> GatewayThread:
    """Run a gateway in a thread and return when it listens; it closes the store at its end."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=_run_thread, args=(store, options, started), name="metadata-gateway", daemon=True)
    thread.start()
    url, loop, stop = started.result(START_TIMEOUT_S)
    return GatewayThread(url, loop, stop, thread)


def _run_thread(
    store: MetadataStore,
    options: GatewayOptions,
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]],
) -> None:
    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        await serve(store, options, stop=stop, ready=lambda url: started.set_result((url, loop, stop)))

    try:
        asyncio.run(main())
    except MooncakeV0Error as error:
        if started.done():
            logger.error("the metadata gateway ended: %s", error.what)
        else:
            started.set_exception(error)


def raise_file_limit() -> None:
    """Let this process open as many connections as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
