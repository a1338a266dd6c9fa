"""One client of the gateway: its requests are answered in the order in which they came, as fast as it takes the answers.

A request to a store in memory is answered within the event that brought it; any other one in a task, while what follows
on the same connection waits. The last answer before a close that the client did not ask for is left to be read: what the
client still sends is thrown away until it closes, for at most LINGER_S.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Coroutine, cast

from mooncake_v0.errors import MooncakeV0Error
from mooncake_v0.metadata.gateway_http import (
    BODY,
    HEAD,
    Reply,
    Request,
    RequestReader,
    chunk,
    encoded,
    encoded_stream_head,
    refusal,
)
from mooncake_v0.metadata.gateway_metrics import GatewayMetrics
from mooncake_v0.metadata.gateway_requests import GatewayRequests
from mooncake_v0.metadata.gateway_watches import Subscription, WatchHub
from mooncake_v0.metadata.http_store import change_row
from mooncake_v0.metadata.store import Change

READ_BODY_S = 10.0
IDLE_S = 3600.0  # an engine keeps its connection between two lookups
LINGER_S = 5.0
WATCH_SIGN_OF_LIFE_S = 15.0


@dataclass(frozen=True)
class Shared:
    """What the connections of a gateway have in common. first_request_s: time for the head of a request to arrive."""

    requests: GatewayRequests
    hub: WatchHub
    metrics: GatewayMetrics
    first_request_s: float
    connections: set[Connection] = field(default_factory=set)


class Connection(asyncio.Protocol):
    """Used inside the gateway's event loop, which calls `check_time` now and then."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._reader = RequestReader()
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_watching = False
        self._ends_after_answers = False
        self._has_ended = False
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._since_s = time.monotonic()  # when the stage began

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # so that a watching client whose host has vanished is noticed
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._shared.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True
        self._shared.connections.discard(self)
        self._waiting.clear()
        if self._is_watching and self._task is not None:
            self._task.cancel()  # any other task goes on: its write may be in the store already

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            return
        reader, stage = self._reader, self._reader.stage
        whole = reader.feed(data)
        if whole or reader.stage is not stage:
            self._since_s = time.monotonic()
        self._waiting.extend(whole)
        self._go_on()
        if reader.wants_continue and not self._is_busy:
            reader.wants_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def eof_received(self) -> bool:
        """A client that only ends its own sending still gets its answers."""
        self._ends_after_answers = True
        return self._is_busy and not self._is_watching and not self._has_ended

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()
        self._go_on()

    def check_time(self) -> None:
        """End what has taken too long."""
        passed_s, stage = time.monotonic() - self._since_s, self._reader.stage
        if self._has_ended:
            if passed_s > LINGER_S:
                self._transport.abort()
        elif self._is_busy:
            return  # the store has a deadline of its own
        elif stage is BODY and passed_s > READ_BODY_S:
            self._refuse(refusal(408, "the body did not arrive in time", "send it whole"))
        elif (stage is HEAD and passed_s > self._shared.first_request_s) or passed_s > IDLE_S:
            self._transport.abort()

    def stop(self) -> None:
        """Answer what has been asked, then close."""
        self._ends_after_answers = True
        if not self._is_busy and self._reader.stage is not BODY:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def _is_busy(self) -> bool:
        return self._task is not None or bool(self._waiting)

    def _go_on(self) -> None:
        """Answer what waits, unless an answer is in the making or the client does not take them."""
        while self._waiting and self._task is None and self._can_write.is_set() and not self._has_ended:
            self._answer(self._waiting.popleft())
        if self._waiting:
            self._transport.pause_reading()
            return
        self._transport.resume_reading()
        if self._reader.refused is not None and self._task is None and not self._has_ended:
            self._refuse(self._reader.refused)

    def _answer(self, request: Request) -> None:
        answering = self._shared.requests.answer(request)
        if not self._shared.requests.answers_at_once:
            self._task = asyncio.get_running_loop().create_task(self._answer_later(request, answering))
            return
        try:
            answering.send(None)
        except StopIteration as done:
            self._reply(request, done.value)

    async def _answer_later(self, request: Request, answering: Coroutine[Any, Any, Reply]) -> None:
        reply = await answering
        self._task = None
        if not self._has_ended:
            self._reply(request, reply)
            self._go_on()

    def _reply(self, request: Request, reply: Reply) -> None:
        if reply.watch_prefix is not None:
            self._is_watching = True
            self._task = asyncio.get_running_loop().create_task(self._watch(request, reply, reply.watch_prefix))
            return
        is_last = not request.keep_alive or (self._ends_after_answers and not self._waiting)
        self._transport.write(encoded(reply, is_last=is_last, without_body=request.method == "HEAD"))
        self._shared.metrics.count(request.method, reply.status, time.perf_counter() - request.arrived_s)
        self._since_s = time.monotonic()
        if is_last:
            self._has_ended = True
            self._transport.close()

    def _refuse(self, reply: Reply) -> None:
        self._has_ended, self._since_s = True, time.monotonic()
        self._shared.metrics.count("other", reply.status, 0.0)
        self._transport.write(encoded(reply, is_last=True))
        self._transport.write_eof()

    async def _watch(self, request: Request, reply: Reply, prefix: str) -> None:
        try:
            subscription = await self._shared.hub.subscribe(prefix)
        except MooncakeV0Error as error:
            self._task, self._is_watching = None, False
            self._reply(request, refusal(503, error.what, error.fix))
            self._go_on()
            return
        is_chunked = request.version == "1.1"
        self._shared.metrics.watchers.inc()
        try:
            self._transport.write(encoded_stream_head(reply, is_chunked=is_chunked))
            await self._send_changes(subscription, is_chunked)
        finally:
            self._shared.metrics.watchers.dec()
            self._shared.hub.unsubscribe(subscription)
            self._transport.close()

    async def _send_changes(self, subscription: Subscription, is_chunked: bool) -> None:
        line = b"\n"
        while True:
            self._transport.write(chunk(line) if is_chunked else line)
            await self._can_write.wait()
            try:
                item = await asyncio.wait_for(subscription.queue.get(), WATCH_SIGN_OF_LIFE_S)
            except asyncio.TimeoutError:
                line = b"\n"
                continue
            if not isinstance(item, Change):
                break
            line = json.dumps(change_row(item)).encode() + b"\n"
        if is_chunked:
            self._transport.write(chunk(b""))
