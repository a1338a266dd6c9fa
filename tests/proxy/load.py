"""Load for measurements: a backend that answers at once, and clients that keep their connections. Plain protocols, so
that what is measured is the proxy. Used by the programs beside it, not by the test suite."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Optional, cast

from tests.proxy.backend import COMPLETION, EVENT_STREAM_HEAD, MODELS, chunk, event, response

HEALTH = response(200, b"")
MODEL_LIST = response(200, json.dumps(MODELS).encode())
ANSWER = response(200, COMPLETION)
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class QuickBackend(asyncio.Protocol):
    """Answers a POST at once; a streamed one with `events` events, `pause_s` apart. service_s delays JSON answers."""

    events = 32
    pause_s = 0.0
    service_s = 0.0

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, end, rest = self.buffer.partition(b"\r\n\r\n")
            if not end:
                return
            length = _content_length(head)
            if len(rest) < length:
                return
            body, self.buffer = rest[:length], rest[length:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self.transport.write(MODEL_LIST if b"/v1/models" in head else HEALTH)
        elif b'"stream": true' not in body:
            if self.service_s:
                asyncio.get_running_loop().call_later(self.service_s, self._write, ANSWER)
            else:
                self.transport.write(ANSWER)
        elif self.pause_s:
            self.transport.write(EVENT_STREAM_HEAD)
            self._next_event(0)
        else:
            self.transport.write(EVENT_STREAM_HEAD + b"".join(chunk(event("tok")) for _ in range(self.events)) + DONE)

    def _write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def _next_event(self, number: int) -> None:
        if self.transport.is_closing():
            return
        if number == self.events:
            self.transport.write(DONE)
            return
        self.transport.write(chunk(event("tok")))
        asyncio.get_running_loop().call_later(self.pause_s, self._next_event, number + 1)


def _content_length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def quick_backend(**attributes: float) -> tuple[asyncio.AbstractServer, str]:
    """Start a backend on a free port; its server and URL."""
    kind = type("Backend", (QuickBackend,), attributes)
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", 0, backlog=4096)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@dataclass
class Outcome:
    """What the clients saw. Latencies in seconds, of complete answers with status 200 only."""

    latencies_s: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    refusal_latencies_s: list[float] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)  # of errors, streamed ones too
    broken: int = 0
    pieces: int = 0
    wall_s: float = 0.0

    def count(self, status: int, latency_s: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        (self.latencies_s if status == 200 else self.refusal_latencies_s).append(latency_s)

    def look_for_error(self, answer: bytes) -> None:
        found = re.search(rb'"code": "(\w+)"', answer)
        if found is not None:
            code = found[1].decode()
            self.codes[code] = self.codes.get(code, 0) + 1


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def request_bytes(stream: bool, prompt_bytes: int) -> bytes:
    prompt = "x" * prompt_bytes
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 64, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Client(asyncio.Protocol):
    """One connection; `ask` sends a request and waits for the end of its answer."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.done: Optional[asyncio.Future[int]] = None
        self.pieces = 0
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.pieces += 1
        end = self._end()
        if end and self.done is not None and not self.done.done():
            self.done.set_result(int(self.buffer[9:12]))

    def _end(self) -> bool:
        head_end = self.buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return False
        head = bytes(self.buffer[:head_end]).lower()
        self.closed = self.closed or b"\r\nconnection: close" in head  # as every client must take it
        if b"chunked" in head:
            return self.buffer.endswith(b"0\r\n\r\n")
        return len(self.buffer) - head_end - 4 >= _content_length(head)

    def connection_lost(self, error: Optional[Exception]) -> None:
        self.closed = True
        if self.done is not None and not self.done.done():
            self.done.set_exception(ConnectionResetError())

    async def ask(self, request: bytes) -> int:
        self.buffer.clear()
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.done


async def run_clients(
    url: str, *, clients: int, requests: int, stream: bool = False, prompt_bytes: int = 2048, seconds: float = 0.0
) -> Outcome:
    """`requests` requests over `clients` connections, or as many as go into `seconds`."""
    outcome = Outcome()
    port = int(url.rsplit(":", 1)[1])
    request = request_bytes(stream, prompt_bytes)
    left = requests
    loop = asyncio.get_running_loop()
    started_s = time.monotonic()

    async def one() -> None:
        nonlocal left
        connection: Optional[Client] = None
        while left > 0 if not seconds else time.monotonic() - started_s < seconds:
            left -= 1
            if connection is None or connection.closed:
                _, connection = await loop.create_connection(Client, "127.0.0.1", port)
            before_s = time.monotonic()
            try:
                status = await connection.ask(request)
            except ConnectionResetError:
                outcome.broken += 1
                continue
            outcome.count(status, time.monotonic() - before_s)
            outcome.look_for_error(bytes(connection.buffer[-600:]))
            outcome.pieces += connection.pieces
            connection.pieces = 0
        if connection is not None:
            connection.transport.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    outcome.wall_s = time.monotonic() - started_s
    return outcome


async def _serve(port: int) -> None:
    kind = type("Backend", (QuickBackend,), {"service_s": 0.02, "pause_s": 0.02, "events": 20})
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    # `python -m tests.proxy.load PORT`: a backend as a process, to be killed and stopped
    asyncio.run(_serve(int(sys.argv[1])))
