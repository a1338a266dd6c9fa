"""Serves the applications with Hypercorn until a signal, then drains. Called by the command line.

SIGTERM: /health answers 503 at once, so that balancers in front look elsewhere; for `drain_delay_s` everything that
still comes is served, each answer closing its connection; then the port is closed and requests in flight have
`drain_s` to end, after which they get an error event. SIGINT goes straight to the closing of the port, and a second
signal of either kind ends what is in flight.

The listening socket may be handed in (`listen_fd`, systemd's socket activation): a successor that has the same socket
takes over without one connection being refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Callable

from hypercorn.asyncio import run as hypercorn_run
from hypercorn.asyncio import serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config

from mooncake_v0.errors import ProxyError
from mooncake_v0.proxy.admin import build_admin_app
from mooncake_v0.proxy.app import build_app
from mooncake_v0.proxy.core import Proxy

logger = logging.getLogger(__name__)

BACKLOG = 4096  # Hypercorn's 100 turns a burst of connections into one-second retries of their SYN
GRACE_S = 2.0  # for the last error events to reach their clients


@dataclass(frozen=True)
class Bind:
    """Where to listen. listen_fd: a listening socket to use instead, -1 for none."""

    host: str
    port: int
    listen_fd: int = -1
    certfile: str = ""
    keyfile: str = ""


class PromptTCPServer(TCPServer):
    """Hypercorn's connection, closed as soon as its client has closed it.

    Hypercorn 0.17 and 0.18 let a connection that its client closed while idle stay open until the keep-alive time is
    over (asyncio/tcp_server.py: the task group waits for the idle timer); at 75 s that is thousands of descriptors.
    """

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


def prepare_process() -> None:
    """Once, before serving: as many descriptors as the system allows, and connections that close when they should."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    hypercorn_run.TCPServer = PromptTCPServer  # type: ignore[attr-defined]


class Listener:
    """One listening socket: ours, or handed in."""

    def __init__(self, bind: Bind) -> None:
        self.bind = bind
        self.inherited = bind.listen_fd >= 0
        self._check_certificate(bind)
        self.socket = self._take(bind.listen_fd) if self.inherited else self._open(bind)

    @staticmethod
    def _check_certificate(bind: Bind) -> None:
        if not bind.certfile:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(bind.certfile, bind.keyfile or None)
        except (OSError, ssl.SSLError) as error:
            raise ProxyError(
                f"cannot use the certificate {bind.certfile!r} with the key {bind.keyfile or bind.certfile!r}: {error}",
                fix="give PEM files of a certificate chain and of its own private key",
            ) from error

    @staticmethod
    def _take(listen_fd: int) -> socket.socket:
        try:
            taken = socket.socket(fileno=listen_fd)
            if taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return taken
            reason = "it does not listen"
        except OSError as error:
            reason = str(error.strerror)
        raise ProxyError(f"descriptor {listen_fd} is not a listening socket: {reason}", fix="hand in one that listens")

    @staticmethod
    def _open(bind: Bind) -> socket.socket:
        try:
            family = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((bind.host, bind.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ProxyError(
                f"cannot listen on {bind.host}:{bind.port}: {error.strerror or error}",
                fix="end what uses the port, or choose another with --port",
            ) from error

    @property
    def url(self) -> str:
        """The address that the kernel gave, for people."""
        host, port = self.socket.getsockname()[:2]
        scheme = "https" if self.bind.certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def config(self, graceful_s: float) -> Config:
        """Hypercorn's settings; every default that would cut a long stream or lose an error is set here."""
        config = Config()
        # a descriptor of its own: Hypercorn, or the event loop, closes the one it is given
        config.bind = [f"fd://{os.dup(self.socket.fileno())}"]
        config.backlog = BACKLOG
        config.graceful_timeout = graceful_s
        config.keep_alive_timeout = 75.0
        config.keep_alive_max_requests = 1_000_000_000
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = logging.getLogger("mooncake_v0.proxy.hypercorn")
        if self.bind.certfile:
            config.certfile = self.bind.certfile
            config.keyfile = self.bind.keyfile or None
        return config

    def close(self) -> None:
        """Stop listening; a socket that was handed in stays open for whoever else has it."""
        if not self.inherited:
            # also ends listening on the descriptor that an event loop may still hold: later connections are
            # refused at once instead of waiting in a backlog that nobody reads
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class Shutdown:
    """Turns signals into the steps of the docstring above."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.asked = asyncio.Event()  # a first signal has come
        self.at_once = asyncio.Event()  # no delay any more
        self.closing = asyncio.Event()  # the ports are to be closed

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.signalled, False)
        loop.add_signal_handler(signal.SIGINT, self.signalled, True)
        loop.add_signal_handler(signal.SIGHUP, self.proxy.access_log.reopen)

    def signalled(self, interactive: bool) -> None:
        if self.asked.is_set():
            self.at_once.set()
            self.proxy.cut_all()
        if interactive:
            self.at_once.set()
        self.proxy.draining = True
        self.asked.set()

    async def run(self) -> None:
        await self.asked.wait()
        logger.info("shutting down: %d requests in flight", len(self.proxy.watchdog.guards))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.at_once.wait(), self.proxy.settings.drain_delay_s)
        self.closing.set()
        await asyncio.sleep(self.proxy.settings.drain_s)
        cut = self.proxy.cut_all()
        logger.warning("%d requests did not end in %.0f s and were cut", cut, self.proxy.settings.drain_s)


async def serve_proxy(
    proxy: Proxy, bind: Bind, admin_bind: Bind | None = None, announce: Callable[[str, str], None] | None = None
) -> None:
    """Serve until a signal arrives and everything has ended. `announce` is told the URLs once they are listened on."""
    prepare_process()
    shutdown = Shutdown(proxy)
    shutdown.install()
    listeners = [Listener(one) for one in (bind, admin_bind) if one is not None]
    apps: list[Any] = [build_app(proxy), build_admin_app(proxy)][: len(listeners)]
    if announce is not None:
        announce(listeners[0].url, listeners[1].url if admin_bind is not None else "")
    ending = asyncio.ensure_future(shutdown.run())
    graceful_s = proxy.settings.drain_s + GRACE_S
    servers = [
        asyncio.ensure_future(_serve(app, listener, graceful_s, shutdown)) for app, listener in zip(apps, listeners)
    ]
    try:
        await asyncio.gather(*servers)
    finally:
        ending.cancel()


async def _serve(app: Any, listener: Listener, graceful_s: float, shutdown: Shutdown) -> None:
    async def trigger() -> None:
        await shutdown.closing.wait()
        listener.close()

    await serve(app, listener.config(graceful_s), shutdown_trigger=trigger)
