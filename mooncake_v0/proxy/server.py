"""Serves the proxy's application with Hypercorn until SIGTERM or SIGINT, then drains. Called by the command line."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

from mooncake_v0.proxy.app import Proxy, build_app

logger = logging.getLogger(__name__)

BACKLOG = 2048  # Hypercorn's 100 turns a burst of connections into one-second retries of their SYN


@dataclass(frozen=True)
class Bind:
    """Where to listen, and with which certificate."""

    host: str
    port: int
    certfile: str = ""
    keyfile: str = ""

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def hypercorn_config(bind: Bind, graceful_s: float) -> Config:
    """Hypercorn's settings; every default that would cut a long stream or lose an error is set here."""
    config = Config()
    config.bind = [bind.address]
    config.backlog = BACKLOG
    config.graceful_timeout = graceful_s
    config.keep_alive_timeout = 75.0
    config.keep_alive_max_requests = 1_000_000_000
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("mooncake_v0.proxy.hypercorn")
    if bind.certfile:
        config.certfile = bind.certfile
        config.keyfile = bind.keyfile or None
    return config


async def serve_proxy(proxy: Proxy, bind: Bind) -> None:
    """Serve until a signal arrives."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    async def shutdown() -> None:
        await stop.wait()
        proxy.draining = True

    app: Any = build_app(proxy)
    await serve(app, hypercorn_config(bind, proxy.settings.drain_s), shutdown_trigger=shutdown)
