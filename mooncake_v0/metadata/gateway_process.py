"""The gateway in a process of its own: what a transfer agent starts for its engine.

An agent whose mooncake.json names a store that the engine cannot speak to itself (redis, an etcd cluster, credentials)
calls `start_gateway_process` before it initialises the engine, gives the engine the handle's `url`, calls `ensure_alive`
now and then, and `close` after the engine is gone. A thread would not do: the engine's `initialize` and `register_memory`
hold the GIL while they wait for their http answer (transfer_engine_py.cpp, 0.3.3.post2), so a gateway in the same process
could never give it.

The child takes its settings, which hold the store's password, as one line on standard input, answers with one line, and
ends when its standard input does: with its parent, however that dies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from mooncake_v0.errors import MetadataError, MooncakeV0Error
from mooncake_v0.metadata.gateway_auth import token_access
from mooncake_v0.metadata.gateway_server import GatewayOptions, serve
from mooncake_v0.metadata.store import DEFAULT_TIMEOUT_S, open_store
from mooncake_v0.metadata.store_url import parse_store_url

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0


class GatewayProcess:
    """A private gateway on loopback. url holds its login: give it to the engine, log `masked_url`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._process, self.masked_url = _start(settings)
        self._settings["port"] = int(self.masked_url.split(":")[2].split("/")[0])

    @property
    def url(self) -> str:
        return self.masked_url.replace("://", f"://agent:{self._settings['token']}@", 1)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ensure_alive(self) -> None:
        """Start it again, at the same address and with the same login, when it has died. Raises MetadataError."""
        if self.is_alive:
            return
        logger.warning(
            "the private metadata gateway has ended (exit code %s) and is started again", self._process.poll()
        )
        _close_pipes(self._process)
        self._process, self.masked_url = _start(self._settings)

    def close(self) -> None:
        """Stop it and wait a few seconds; may be called twice."""
        _close_pipes(self._process)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)


def start_gateway_process(
    store_url: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, stale_reads: bool = True
) -> GatewayProcess:
    """Start a private gateway over a store and return when it listens.

    The engine sends the url's login as HTTP Basic. The caller sets NO_PROXY for 127.0.0.1 before the engine starts:
    libcurl honours http_proxy. Raises MetadataError for a bad store URL; a store that is down is no error here.
    """
    parse_store_url(store_url)
    token = secrets.token_urlsafe(24)
    return GatewayProcess(
        {"store_url": store_url, "token": token, "timeout_s": timeout_s, "stale_reads": stale_reads, "port": 0}
    )


def _start(settings: dict[str, Any]) -> tuple[subprocess.Popen[bytes], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_v0.metadata.gateway_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    answer = _first_answer(process, json.dumps(settings).encode() + b"\n")
    if "url" in answer:
        return process, str(answer["url"])
    _close_pipes(process)
    process.kill()
    process.wait(STOP_TIMEOUT_S)
    raise MetadataError(str(answer["error"]), fix=str(answer["fix"]))


def _first_answer(process: subprocess.Popen[bytes], settings: bytes) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(settings)
        process.stdin.flush()
    except BrokenPipeError:
        logger.debug("the gateway ended before it read its settings")
    deadline, line = time.monotonic() + START_TIMEOUT_S, b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return {"error": f"the metadata gateway did not start within {START_TIMEOUT_S:g} s", "fix": "see the load"}
        part = os.read(process.stdout.fileno(), 65536)
        if not part:
            return {"error": f"the metadata gateway ended at once, exit code {process.wait(1)}", "fix": "see its log"}
        line += part
    answer: dict[str, Any] = json.loads(line)
    return answer


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()


async def _serve_until_stdin_ends(settings: dict[str, Any]) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    options = GatewayOptions(
        HOST, settings["port"], access=token_access(settings["token"]), stale_reads=settings["stale_reads"]
    )

    def wait_for_end() -> None:
        while sys.stdin.readline():
            pass  # nothing is sent after the settings
        loop.call_soon_threadsafe(stop.set)

    def ready(url: str) -> None:
        _tell({"url": url})
        threading.Thread(target=wait_for_end, name="parent", daemon=True).start()

    store = open_store(settings["store_url"], timeout_s=settings["timeout_s"])
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await serve(store, options, stop=stop, ready=ready)


def _tell(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    """``python -m mooncake_v0.metadata.gateway_process``; see the module's docstring."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to the parent, whose end ends us
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s mooncake-v0 metadata gateway] %(message)s"
    )
    settings = json.loads(sys.stdin.readline())
    try:
        asyncio.run(_serve_until_stdin_ends(settings))
    except MooncakeV0Error as error:
        _tell({"error": error.what, "fix": error.fix})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
