"""A small HTTP server whose every byte a test decides: what vLLM would say, and everything it never should.

Answers /health, /v1/models and /version like an instance of vLLM; what POST requests get is `behaviour`, which writes
to the socket itself, so that resets, garbage and half answers are real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Awaitable, Callable, Optional

from mooncake_v0.handoff import GAUGE

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]}


@dataclass
class Received:
    """One request as it came in. ended: when its connection was closed by the peer before an answer, loop time."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> dict[str, object]:
        value: dict[str, object] = json.loads(self.body)
        return value


Behaviour = Callable[[Received, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def response(status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


EVENT_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def answer(status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> Behaviour:
    """Answer at once."""

    async def behave(_: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status, body, content_type, extra))

    return behave


def vllm_error(status: int) -> bytes:
    return json.dumps({"object": "error", "message": f"status {status}", "type": "E", "code": status}).encode()


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def events(count: int, pause_s: float = 0.0, ending: bytes = b"data: [DONE]\n\n") -> Behaviour:
    """A stream of `count` events and its end."""

    async def behave(_: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_STREAM_HEAD)
        for number in range(count):
            writer.write(chunk(event(f"t{number}")))
            await writer.drain()
            if pause_s:
                await asyncio.sleep(pause_s)
        writer.write((chunk(ending) if ending else b"") + b"0\r\n\r\n")

    return behave


def reset_now(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as the kernel of a killed process does when data is unread."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def reset(_: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    reset_now(writer)


async def garbage(_: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
    await writer.drain()
    writer.close()


async def silence(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answer; note when the peer gives up."""
    with contextlib.suppress(ConnectionError):
        await reader.read(1)
    received.gone.set()


def first_events_then(count: int, end: Callable[[asyncio.StreamWriter], None], tail: bytes = b"") -> Behaviour:
    """Some events, half of another, then an end that is none."""

    async def behave(_: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_STREAM_HEAD)
        for number in range(count):
            writer.write(chunk(event(f"t{number}")))
        if tail:
            writer.write(chunk(tail))
        await writer.drain()
        await asyncio.sleep(0.05)
        end(writer)

    return behave


COMPLETION = json.dumps(
    {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{"index": 0, "text": "ok"}],
        "usage": {"prompt_tokens": 3, "total_tokens": 11, "completion_tokens": 8},
    }
).encode()


async def like_vllm(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A completion, streamed or not as the body asks."""
    if received.json.get("stream"):
        await events(3)(received, reader, writer)
    else:
        writer.write(response(200, COMPLETION))


def agent_metrics(epoch: str, peer_epoch: str) -> bytes:
    """What of an instance's /metrics tells whose peer its transfer agent is; the lines before and after are others'."""
    lines = ("vllm:num_requests_running 0.0", f'{GAUGE}{{epoch="{epoch}",peer_epoch="{peer_epoch}"}} 1.0')
    return "\n".join((f'{GAUGE}{{epoch="{epoch}",peer_epoch="0ld"}} 0.0', *lines, "up 1.0", "")).encode()


class Backend:
    """One instance. `received` holds the POST requests in the order of their arrival."""

    def __init__(self, behaviour: Behaviour = like_vllm) -> None:
        self.behaviour = behaviour
        self.healthy = True
        self.metrics = b""
        self.received: list[Received] = []
        self.connections = 0
        self.gets = 0
        self.port = 0
        self._server: Optional[asyncio.AbstractServer] = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> Backend:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port, backlog=2048, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """As when the process is killed: the port is closed, every connection reset."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for writer in list(self._writers):
            reset_now(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def posts(self, path: str = "") -> list[Received]:
        return [one for one in self.received if not path or one.target.startswith(path)]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False when the connection has ended."""
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        received = Received(method, target, headers, body)
        if method == "GET":
            self.gets += 1
            await self._get(target, writer)
        else:
            self.received.append(received)
            await self.behaviour(received, reader, writer)
        await writer.drain()
        return not writer.is_closing()

    async def _get(self, target: str, writer: asyncio.StreamWriter) -> None:
        known = {"/health": b"", "/v1/models": json.dumps(MODELS).encode(), "/version": b'{"version":"0.6.4.post1"}'}
        known["/metrics"] = self.metrics
        status = 200 if target in known else 404
        if target == "/health" and not self.healthy:
            status = 500
        writer.write(response(status, known.get(target, b"{}")))
