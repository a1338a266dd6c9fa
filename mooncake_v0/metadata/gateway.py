"""The gateway in a thread of this process, for programs that hold no engine: benchmarks, the demo, tests.

An engine in the same process would wait for it in vain, holding the GIL: `gateway_process` is for those.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from concurrent.futures import Future

from mooncake_v0.errors import MooncakeV0Error
from mooncake_v0.metadata.gateway_auth import Access, token_access
from mooncake_v0.metadata.gateway_server import GatewayOptions, serve
from mooncake_v0.metadata.store import DEFAULT_TIMEOUT_S, MetadataStore, open_store

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0


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
