"""The client's end of one request, as an ASGI application sees it: read the body, send one response.

A response may still be anything until `start`; after it an error can only be told inside the stream, and for a body
with a fixed form (JSON) only by closing the connection, so that the client sees that it is not whole.
"""

from __future__ import annotations

import asyncio
from typing import Any, Awaitable, Callable

from mooncake_v0.proxy.api_errors import ApiError, invalid_request, sse_error_event
from mooncake_v0.proxy.guard import CLIENT_GONE, Cut, Guard
from mooncake_v0.proxy.headers import RawHeaders, header

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class ClientSide:
    """One request's way in and way out."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, extra: RawHeaders) -> None:
        self.headers: RawHeaders = scope["headers"]
        self.request_id = request_id
        self.extra = extra  # headers that every response carries (CORS, connection: close while draining)
        self.started = False
        self.finished = False
        self.events = False  # the response that has started is a stream of events
        self.status = 0
        self.bytes_sent = 0
        self._receive = receive
        self._send = send
        self._watcher: asyncio.Task[None] | None = None

    async def read_body(self, limit_bytes: int) -> bytes:
        """The whole body. Raises ApiError 413 above the limit, Cut when the client goes away before its end."""
        declared = header(self.headers, b"content-length")
        if declared.isdigit() and int(declared) > limit_bytes:
            raise self._too_large(limit_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise Cut(CLIENT_GONE)
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise self._too_large(limit_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self, limit_bytes: int) -> ApiError:
        # the rest of the body stays unread, so the connection cannot be used again
        self.extra = [*self.extra, (b"connection", b"close")]
        return invalid_request(413, f"the body is larger than {limit_bytes} bytes", "request_too_large")

    def watch(self, guard: Guard) -> None:
        """From now on a client that goes away cuts the guard. Call after `read_body`."""
        self._watcher = asyncio.ensure_future(self._wait_for_disconnect(guard))

    async def _wait_for_disconnect(self, guard: Guard) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # the server also says so when the answer has been sent, while its sender still waits to hear of it
        if not self.finished:
            guard.cut(CLIENT_GONE)

    def unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    async def start(self, status: int, headers: RawHeaders, *, events: bool = False) -> None:
        self.started = True
        self.events = events
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.extra]})

    async def write(self, data: bytes) -> None:
        self.bytes_sent += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        self.finished = True
        self.bytes_sent += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def send_whole(self, status: int, headers: RawHeaders, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.finish(body)

    async def fail(self, error: ApiError) -> None:
        """Tell the client of an error in the form that is still possible."""
        if self.started:
            if self.events:
                await self.finish(sse_error_event(error, self.request_id))
            return  # a body that is not finished: the server closes the connection
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", self.request_id.encode("latin-1")),
        ]
        if error.retry_after_s:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        await self.send_whole(error.status, headers, error.body(self.request_id))
