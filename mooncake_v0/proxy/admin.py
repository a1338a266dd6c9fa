"""The operator's application, on a port of its own: pairs and their state, for programs and for people.

    GET /                       a page that shows the below, without anything from elsewhere
    GET /status                 pairs, health, load, latency, as JSON
    GET /pairs                  the pairs
    POST /pairs                 {"name", "prefill", "decode"}: add a pair
    POST /pairs/NAME/drain      no new requests for it          POST /pairs/NAME/resume
    DELETE /pairs/NAME          forget it; requests in flight on it end as they would
    GET /metrics, /livez

With an admin key every path but the page itself and /livez needs it. A page of another origin cannot call: requests
that change something need a JSON content type, which a browser asks leave for, and leave is never given.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from quart import Quart, Response, request

from mooncake_v0 import __version__
from mooncake_v0.errors import ProxyError
from mooncake_v0.proxy.api_errors import invalid_request
from mooncake_v0.proxy.app import bare_app, json_response, raw_headers
from mooncake_v0.proxy.core import Proxy
from mooncake_v0.proxy.headers import header
from mooncake_v0.proxy.pair_source import check_pairs
from mooncake_v0.proxy.pairs import Instance, Pair
from mooncake_v0.proxy.settings import PairSpec

PAGE = Path(__file__).with_name("status.html")
OPEN_PATHS = frozenset({"/", "/livez"})


def build_admin_app(proxy: Proxy) -> Quart:
    """The application for the admin port; shares the proxy's state, does not start or stop it."""
    app = bare_app(proxy)

    @app.before_request
    async def check_key() -> None:
        if request.path not in OPEN_PATHS:
            proxy.admin_keys.check(header(raw_headers(), b"authorization"))
        if request.method not in ("GET", "HEAD") and request.mimetype != "application/json":
            raise invalid_request(415, "send it as content-type: application/json", "unsupported_media_type")

    _add_views(app, proxy)
    _add_changes(app, proxy)
    return app


def _add_views(app: Quart, proxy: Proxy) -> None:
    page = PAGE.read_text(encoding="utf-8")

    @app.get("/")
    async def show_page() -> Response:
        response = Response(page, content_type="text/html; charset=utf-8")
        response.headers["content-security-policy"] = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        )
        return response

    @app.get("/livez")
    async def livez() -> Response:
        return json_response(200, {"status": "ok"})

    @app.get("/status")
    async def status() -> Response:
        return json_response(200, proxy_status(proxy))

    @app.get("/pairs")
    async def pairs() -> Response:
        return json_response(200, {"pairs": proxy_status(proxy)["pairs"]})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(proxy.metrics.render(), content_type="text/plain; version=0.0.4; charset=utf-8")


def _add_changes(app: Quart, proxy: Proxy) -> None:
    @app.post("/pairs")
    async def add_pair() -> Response:
        spec = _pair_in_body(await request.get_data(as_text=False))
        if spec.name in proxy.balancer.pairs:
            raise invalid_request(409, f"there is a pair {spec.name!r} already", "pair_exists")
        proxy.add_pair(spec)
        return json_response(201, pair_status(proxy.balancer.pairs[spec.name]))

    @app.post("/pairs/<name>/drain")
    async def drain(name: str) -> Response:
        pair = _pair(proxy, name)
        pair.draining = True
        return json_response(200, pair_status(pair))

    @app.post("/pairs/<name>/resume")
    async def resume(name: str) -> Response:
        pair = _pair(proxy, name)
        pair.draining = False
        proxy.balancer.wake()
        return json_response(200, pair_status(pair))

    @app.delete("/pairs/<name>")
    async def remove(name: str) -> Response:
        pair = _pair(proxy, name)
        proxy.remove_pair(name)
        return json_response(200, pair_status(pair))


def _pair(proxy: Proxy, name: str) -> Pair:
    pair = proxy.balancer.pairs.get(name)
    if pair is None:
        raise invalid_request(404, f"there is no pair {name!r}", "no_such_pair")
    return pair


def _pair_in_body(body: bytes | str) -> PairSpec:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise invalid_request(400, f"the body is not JSON: {error}", "invalid_json") from error
    keys = ("name", "prefill", "decode")
    if not isinstance(value, dict) or set(value) != set(keys) or not all(isinstance(value[k], str) for k in keys):
        raise invalid_request(400, 'the body must be {"name": ..., "prefill": URL, "decode": URL}', "invalid_pair")
    try:
        return check_pairs([PairSpec(value["name"], value["prefill"], value["decode"])])[0]
    except ProxyError as error:
        raise invalid_request(400, f"{error.what}; {error.fix}", "invalid_pair") from error


def proxy_status(proxy: Proxy) -> dict[str, Any]:
    """Everything that the page shows."""
    return {
        "version": __version__,
        "ready": proxy.ready,
        "draining": proxy.draining,
        "uptime_s": round(time.time() - proxy.started_at, 1),
        "queued": len(proxy.balancer.queue),
        "in_flight": proxy.balancer.inflight,
        "pairs": [pair_status(pair) for pair in proxy.balancer.pairs.values()],
    }


def pair_status(pair: Pair) -> dict[str, Any]:
    return {
        "name": pair.name,
        "draining": pair.draining,
        "instances_differ": pair.differs,
        "early_decode": pair.hands_off_early,
        "in_flight": pair.inflight,
        "places": pair.limits.pair_requests,
        "prefill": instance_status(pair.prefill),
        "decode": instance_status(pair.decode),
    }


def instance_status(instance: Instance) -> dict[str, Any]:
    """State, load and recent latency; prefill: the whole leg, decode: to its first byte."""
    latencies_s = sorted(instance.latencies_s)
    return {
        "url": instance.url,
        "state": instance.status(time.monotonic()),
        "in_flight": instance.inflight,
        "consecutive_failures": instance.failures,
        "ejections": instance.ejections_total,
        "models": list(instance.models),
        "max_model_len": instance.max_model_len,
        "p50_ms": _percentile_ms(latencies_s, 0.5),
        "p99_ms": _percentile_ms(latencies_s, 0.99),
    }


def _percentile_ms(sorted_s: list[float], share: float) -> float | None:
    if not sorted_s:
        return None
    return round(sorted_s[min(len(sorted_s) - 1, int(len(sorted_s) * share))] * 1000, 1)
