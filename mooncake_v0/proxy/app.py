"""The public application: the relay for inference in front, Quart for everything else.

POST /v1/completions, /v1/chat/completions      the relay
GET /v1/models                                  the models of all pairs that are up
POST /tokenize, /detokenize, GET /version       a decode instance's answer, unchanged
GET /health, /livez, /metrics                   the proxy's own
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Awaitable, Callable

from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from mooncake_v0.proxy.api_errors import ApiError, invalid_request, unavailable
from mooncake_v0.proxy.client_side import Receive, Scope, Send
from mooncake_v0.proxy.core import Proxy
from mooncake_v0.proxy.headers import RawHeaders, forwarded, header, request_id_of, returned
from mooncake_v0.proxy.legs import Answer, LegError
from mooncake_v0.proxy.prefill_request import CHAT, COMPLETIONS

RELAYED = frozenset({COMPLETIONS, CHAT})
OPEN_PATHS = frozenset({"/health", "/livez", "/metrics"})
ASK_S = 30.0  # for the small questions that are passed to a decode instance


class HotPath:
    """Inference goes straight to the relay: Quart's dispatch would cost as much as both legs together."""

    def __init__(self, proxy: Proxy, quart: Callable[[Any, Any, Any], Awaitable[None]]) -> None:
        self.proxy = proxy
        self.quart = quart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in RELAYED:
            assert self.proxy.relay is not None
            await self.proxy.relay(scope, receive, send)
        else:
            await self.quart(scope, receive, send)


def build_app(proxy: Proxy) -> Quart:
    """The application that Hypercorn serves to clients."""
    app = bare_app(proxy)
    app.before_serving(proxy.start)
    app.after_serving(proxy.stop)
    _add_checks(app, proxy)
    _add_own_routes(app, proxy)
    _add_passed_routes(app, proxy)
    app.asgi_app = HotPath(proxy, app.asgi_app)  # type: ignore[assignment]
    return app


def bare_app(proxy: Proxy) -> Quart:
    """A Quart application whose errors have OpenAI's shape and whose answers nothing cuts short."""
    app = Quart(__name__)
    app.config["MAX_CONTENT_LENGTH"] = proxy.settings.limits.body_bytes
    app.config["RESPONSE_TIMEOUT"] = None

    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        return error_response(error)

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        words = {
            404: f"no such path: {request.method} {request.path}",
            405: f"{request.path} does not take {request.method}",
        }
        status = error.code or 500
        response = error_response(invalid_request(status, words.get(status, error.name), f"http_{status}"))
        if status == 405 and "Allow" in error.get_response().headers:
            response.headers["Allow"] = error.get_response().headers["Allow"]
        return response

    return app


def raw_headers() -> RawHeaders:
    """The request's headers as the relay sees them."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]


def json_response(status: int, value: Any) -> Response:
    return Response(json.dumps(value), status=status, content_type="application/json")


def error_response(error: ApiError) -> Response:
    request_id = request_id_of(raw_headers())
    response = Response(error.body(request_id), status=error.status, content_type="application/json")
    response.headers["x-request-id"] = request_id
    if error.retry_after_s:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response


def _add_checks(app: Quart, proxy: Proxy) -> None:
    """The key of the client before, the headers that every response carries after."""

    @app.before_request
    async def check_key() -> Response | None:
        if request.method == "OPTIONS":
            return preflight(proxy)
        if request.path not in OPEN_PATHS:
            proxy.client_keys.check(header(raw_headers(), b"authorization"))
        return None

    @app.after_request
    async def add_headers(response: Response) -> Response:
        for name, value in proxy.response_headers(raw_headers()):
            response.headers[name.decode("latin-1")] = value.decode("latin-1")
        return response


def preflight(proxy: Proxy) -> Response:
    """A browser's question whether it may call; without allowed origins there is nothing to ask."""
    if not proxy.settings.cors_origins:
        raise invalid_request(405, f"{request.path} does not take OPTIONS", "http_405")
    response = Response(b"", status=204)
    response.headers["access-control-allow-methods"] = "GET, POST, OPTIONS"
    response.headers["access-control-allow-headers"] = request.headers.get("access-control-request-headers", "*")
    response.headers["access-control-max-age"] = "600"
    return response


def _add_own_routes(app: Quart, proxy: Proxy) -> None:
    @app.get("/livez")
    async def livez() -> Response:
        return json_response(200, {"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        if proxy.ready:
            return json_response(200, {"status": "ok"})
        raise unavailable("the proxy is shutting down" if proxy.draining else "no pair is up", code="not_ready")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(proxy.metrics.render(), content_type="text/plain; version=0.0.4; charset=utf-8")


def _add_passed_routes(app: Quart, proxy: Proxy) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        answers = await asyncio.gather(*(_ask(proxy, name) for name in proxy.balancer.pairs))
        return _union_of_models([answer for answer in answers if answer is not None])

    async def passed() -> Response:
        for name in list(proxy.balancer.pairs):
            answer = await _ask(proxy, name)
            if answer is not None:
                return _as_response(answer)
        raise unavailable("no decode instance can be reached")

    for path in RELAYED:  # never reached, but makes other methods a 405 that names the right one
        app.add_url_rule(path, path, passed, methods=["POST"])
    for path, method in (("/tokenize", "POST"), ("/detokenize", "POST"), ("/version", "GET")):
        app.add_url_rule(path, path, passed, methods=[method])


async def _ask(proxy: Proxy, name: str) -> Answer | None:
    """The decode instance's answer to this same request; None when it gives none."""
    pair = proxy.balancer.pairs.get(name)
    if pair is None or pair.decode.refuses or proxy.upstream is None:
        return None
    raw = raw_headers()
    headers = forwarded(raw, request_id_of(raw), proxy.settings.upstream_key, keep_authorization=not proxy.client_keys)
    data = await request.get_data(as_text=False)
    body = data.encode() if isinstance(data, str) else data
    query = request.query_string.decode("latin-1")
    target = f"{request.path}?{query}" if query else request.path
    try:
        asking = proxy.upstream.exchange(pair.decode, request.method, target, body, headers)
        return await asyncio.wait_for(asking, ASK_S)
    except (LegError, asyncio.TimeoutError):
        return None


def _as_response(answer: Answer) -> Response:
    response = Response(answer.body, status=answer.status)
    response.headers.clear()
    for name, value in returned(answer.headers, request_id_of(raw_headers())):
        response.headers.add(name.decode("latin-1"), value.decode("latin-1"))
    return response


def _union_of_models(answers: list[Answer]) -> Response:
    """One list of the models of all decode instances; a single answer, and a refusal, as they are."""
    if not answers:
        raise unavailable("no decode instance can be reached")
    good = [answer for answer in answers if answer.status == 200]
    if len(good) < 2:
        return _as_response(good[0] if good else answers[0])
    cards: dict[Any, Any] = {}
    for answer in good:
        for card in json.loads(answer.body).get("data", ()):
            cards.setdefault(card.get("id"), card)
    return json_response(200, {"object": "list", "data": list(cards.values())})
