"""The proxy as an ASGI application: the relay in front, a Quart app for everything that is not inference.

`build_app` puts the parts together. Life cycle: `before_serving` opens the HTTP clients and starts the watchdog and
one prober an instance; `after_serving` stops them. Pairs may come and go in between (`add_pair`, `remove_pair`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any, Callable, Sequence

from quart import Quart, Response, request

from mooncake_v0.proxy.api_errors import ApiError, invalid_request, unavailable
from mooncake_v0.proxy.attempt import Services
from mooncake_v0.proxy.balancer import Balancer
from mooncake_v0.proxy.client_side import Receive, Scope, Send
from mooncake_v0.proxy.guard import Watchdog
from mooncake_v0.proxy.headers import RawHeaders, forwarded, request_id_of, returned
from mooncake_v0.proxy.health import Prober
from mooncake_v0.proxy.legs import LegError, Upstream
from mooncake_v0.proxy.pairs import Instance, Pair
from mooncake_v0.proxy.prefill_request import CHAT, COMPLETIONS
from mooncake_v0.proxy.record import Record
from mooncake_v0.proxy.relay import Relay
from mooncake_v0.proxy.settings import PairSpec, ProxySettings

logger = logging.getLogger(__name__)

RELAYED = frozenset({COMPLETIONS, CHAT})


class Proxy:
    """All state of one running proxy."""

    def __init__(self, settings: ProxySettings, pairs: Sequence[PairSpec]) -> None:
        self.settings = settings
        self.balancer = Balancer(settings.limits)
        self.watchdog = Watchdog()
        self.draining = False
        self.upstream: Upstream | None = None
        self.relay: Relay | None = None
        self._initial = tuple(pairs)
        self._tasks: list[asyncio.Task[None]] = []
        self._probers: dict[str, list[asyncio.Task[None]]] = {}

    async def start(self) -> None:
        self.upstream = Upstream(self.settings.timeouts)
        services = Services(self.settings, self.balancer, self.upstream)
        self.relay = Relay(services, self.watchdog, self.finished, self.response_headers)
        self._tasks.append(asyncio.ensure_future(self.watchdog.run()))
        for spec in self._initial:
            self.add_pair(spec)

    async def stop(self) -> None:
        for name in list(self.balancer.pairs):
            self.remove_pair(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.upstream is not None:
            await self.upstream.close()

    def add_pair(self, spec: PairSpec) -> None:
        assert self.upstream is not None
        pair = Pair(spec, self.settings.limits, self.settings.health)
        probers = [
            Prober(instance, pair, self.upstream, self.settings.upstream_key, self.instance_changed)
            for instance in pair.instances
        ]
        self._probers[spec.name] = [asyncio.ensure_future(prober.run()) for prober in probers]
        self.balancer.add(pair)

    def remove_pair(self, name: str) -> None:
        self.balancer.remove(name)
        for task in self._probers.pop(name, []):
            task.cancel()

    def instance_changed(self, instance: Instance) -> None:
        """An instance came up, went down or got stuck: let those who wait know."""
        if instance.state == "up" and not instance.wedged:
            self.balancer.wake()
        elif self._other_usable(instance):
            instance.release_movable()

    def _other_usable(self, lost: Instance) -> bool:
        now_s = time.monotonic()
        return any(
            pair.decode.usable(now_s) and pair.decode is not lost and pair.prefill is not lost
            for pair in self.balancer.pairs.values()
        )

    @property
    def ready(self) -> bool:
        return not self.draining and any(not pair.decode.refuses for pair in self.balancer.pairs.values())

    def response_headers(self, headers: RawHeaders) -> RawHeaders:
        """Headers that every response to this request carries."""
        return [(b"connection", b"close")] if self.draining else []

    def finished(self, record: Record) -> None:
        logger.debug("%s", record)


class HotPath:
    """Inference requests go to the relay, everything else to Quart, whose dispatch costs as much as both legs."""

    def __init__(self, proxy: Proxy, quart: Callable[[Any, Any, Any], Any]) -> None:
        self.proxy = proxy
        self.quart = quart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in RELAYED:
            assert self.proxy.relay is not None
            await self.proxy.relay(scope, receive, send)
        else:
            await self.quart(scope, receive, send)


def json_response(status: int, value: Any) -> Response:
    return Response(json.dumps(value), status=status, content_type="application/json")


def error_response(error: ApiError) -> Response:
    headers = list(request.headers)
    request_id = request_id_of([(name.lower().encode(), value.encode("latin-1")) for name, value in headers])
    response = Response(error.body(request_id), status=error.status, content_type="application/json")
    response.headers["x-request-id"] = request_id
    if error.retry_after_s:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


def build_app(proxy: Proxy) -> Quart:
    """The application that Hypercorn serves."""
    app = Quart(__name__)
    app.config["MAX_CONTENT_LENGTH"] = proxy.settings.limits.body_bytes
    app.config["RESPONSE_TIMEOUT"] = None
    app.before_serving(proxy.start)
    app.after_serving(proxy.stop)
    _add_routes(app, proxy)
    app.asgi_app = HotPath(proxy, app.asgi_app)  # type: ignore[assignment]
    return app


def _add_routes(app: Quart, proxy: Proxy) -> None:
    @app.get("/health")
    async def health() -> Response:
        if proxy.ready:
            return json_response(200, {"status": "ok"})
        return error_response(unavailable("shutting down" if proxy.draining else "no pair is up"))

    @app.get("/v1/models")
    async def models() -> Response:
        return await pass_to_decode(proxy)


async def pass_to_decode(proxy: Proxy) -> Response:
    """Answer with what a decode instance says to the same request."""
    assert proxy.upstream is not None
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
    request_id = request_id_of(raw)
    headers = forwarded(raw, request_id, proxy.settings.upstream_key)
    data = await request.get_data(as_text=False)
    body = data.encode() if isinstance(data, str) else data
    query = request.query_string.decode("latin-1")
    target = f"{request.path}?{query}" if query else request.path
    for pair in proxy.balancer.pairs.values():
        if pair.decode.refuses:
            continue
        try:
            answer = await asyncio.wait_for(
                proxy.upstream.exchange(pair.decode, request.method, target, body, headers),
                proxy.settings.timeouts.decode_first_byte_s,
            )
        except (LegError, asyncio.TimeoutError):
            continue
        response = Response(answer.body, status=answer.status)
        response.headers.clear()
        for name, value in returned(answer.headers, request_id):
            response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
        return response
    return error_response(unavailable("no decode instance can be reached"))


__all__ = ["Proxy", "build_app", "invalid_request"]
