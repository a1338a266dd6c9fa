"""What the gateway answers: request data in, reply data out, no sockets. `gateway_connection` is the HTTP around it.

The contract of the pinned engine (0.3.3.post2, transfer_metadata_plugin.cpp, and the wheel's own server):

    GET    /metadata?key=K            200 + value | 404; 422 for a value that would make the engine throw
    PUT    /metadata?key=K  value     200, also over an existing key: a crashed engine's keys are still there
    DELETE /metadata?key=K            200 | 404

Ours besides: `ttl` (seconds) on PUT, `raw` on GET (the value whatever it is), `If-Match` on DELETE, GET
/metadata/list?prefix=P, GET /metadata/watch?prefix=P (one JSON object a line), GET /health (a put, get and delete at the
store) and GET /metrics (Prometheus).
Errors are JSON: {"error": what, "fix": how}.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

import msgspec

from mooncake_v0.errors import MetadataError, StoreUnavailableError, UnsupportedError
from mooncake_v0.metadata.engine_values import fault_in
from mooncake_v0.metadata.gateway_auth import Access
from mooncake_v0.metadata.gateway_http import Reply, Request, refusal
from mooncake_v0.metadata.gateway_metrics import GatewayMetrics
from mooncake_v0.metadata.http_store import entry_row, value_tag
from mooncake_v0.metadata.store_runner import StoreRunner

logger = logging.getLogger(__name__)

MAX_KEY_BYTES = 4096
MAX_SOUND_KEYS = 20_000
MAX_TTL_S = 10 * 365 * 86400
PATHS = ("/metadata", "/metadata/", "/")
NOT_FOUND = Reply(404, b'{"error": "metadata not found"}')
UPDATED = Reply(200, b'{"status": "updated"}')
DELETED = Reply(200, b'{"status": "deleted"}')


class GatewayRequests:
    """One store, one set of rules; used by one event loop."""

    def __init__(
        self, runner: StoreRunner, *, access: Access, metrics: GatewayMetrics, default_ttl_s: float | None = None
    ) -> None:
        self._runner = runner
        self._access = access
        self._metrics = metrics
        self._default_ttl_s = default_ttl_s
        self._sound: dict[str, int] = {}
        self._id = uuid.uuid4().hex

    @property
    def answers_at_once(self) -> bool:
        """Whether `answer` never waits: the store is in this process's memory."""
        return self._runner.is_inline

    async def answer(self, request: Request) -> Reply:
        """The reply to one request."""
        method = request.method
        path, _, query = request.target.partition("?")
        if path == "/health" and method == "GET":
            return await self._health()
        if not self._access.allows(request.authorization):
            return refusal(401, "this metadata service needs a login", "send its token or user and password")
        try:
            if path in PATHS:
                return await self._one_key(method, query, request.if_match, request.body)
            return await self._rest(method, path, query)
        except ValueError as error:
            return refusal(400, f"request not understood: {error}", "percent-encode the key as UTF-8: ?key=…")
        except StoreUnavailableError as error:
            return refusal(503, error.what, error.fix, {"Retry-After": "1"})
        except UnsupportedError as error:
            return refusal(501, error.what, error.fix)
        except MetadataError as error:
            logger.error("%s failed: %s", method, error.what)
            return refusal(500, error.what, error.fix)
        except Exception:  # a fault of ours: the client is told, its connection lives on
            logger.exception("%s failed", method)
            return refusal(500, "the gateway failed", "see its log")

    async def _one_key(self, method: str, query: str, if_match: str | None, body: bytes) -> Reply:
        key, ttl_s, is_raw = _read_query(query)
        if method == "GET":
            found = await self._runner.get(key)
            if found.value is None:
                return NOT_FOUND
            fault = None if is_raw else self._fault(key, found.value)
            if fault is not None:
                logger.warning("the value of %r is kept from the engine: %s", key, fault)
                return refusal(422, f"the value is corrupt: {fault}", "restart that instance, or remove the key")
            stale = {} if found.stale_s is None else {"Age": f"{found.stale_s:.0f}", "Warning": '110 - "store is down"'}
            return Reply(200, found.value, headers=stale)
        if method == "PUT":
            await self._runner.put(key, body, self._default_ttl_s if ttl_s is None else ttl_s)
            return UPDATED
        if method == "DELETE":
            return await self._delete(key, if_match)
        return refusal(
            405, f"method {method} is not known here", "use GET, PUT or DELETE", {"Allow": "GET, PUT, DELETE"}
        )

    def _fault(self, key: str, value: bytes) -> str | None:
        # a descriptor is read far more often than written, and reading its JSON costs as much as the rest of a GET
        mark = hash(value)
        if self._sound.get(key) == mark:
            return None
        fault = fault_in(key, value)
        if fault is None:
            if len(self._sound) >= MAX_SOUND_KEYS:
                self._sound.clear()
            self._sound[key] = mark
        return fault

    async def _delete(self, key: str, if_match: str | None) -> Reply:
        if if_match is None:
            return DELETED if await self._runner.delete(key) else NOT_FOUND
        found = await self._runner.get(key)
        if found.value is None or found.stale_s is not None:
            return NOT_FOUND
        if value_tag(found.value) != if_match or not await self._runner.delete(key, found.value):
            return refusal(412, "the value has changed", "read it again")
        return DELETED

    async def _rest(self, method: str, path: str, query: str) -> Reply:
        if path not in ("/metadata/list", "/metadata/watch", "/metrics"):
            return refusal(404, f"there is nothing at {path}", "the engine's path is /metadata")
        if method != "GET":
            return refusal(405, f"method {method} is not known here", "use GET", {"Allow": "GET"})
        if path == "/metrics":
            return Reply(200, self._metrics.text(self._runner), self._metrics.content_type)
        prefix = dict(parse_qsl(query, keep_blank_values=True, errors="strict")).get("prefix", "")
        if path == "/metadata/watch":
            return Reply(200, b"", watch_prefix=prefix)
        entries = await self._runner.run(lambda: self._runner.store.list(prefix))
        return Reply(200, msgspec.json.encode({"entries": [entry_row(entry) for entry in entries]}))

    async def _health(self) -> Reply:
        """A round trip of a key of this gateway's own, so that a store which answers 200 to anything is found out."""
        key, value, started = f"mooncake-v0/probe/{self._id}", uuid.uuid4().bytes.hex().encode(), time.perf_counter()
        store = self._runner.store

        def round_trip() -> bool:
            store.put(key, value, ttl_s=60)
            return store.get(key) == value and store.delete(key)

        try:
            is_good, reason = await self._runner.run(round_trip), "the store lost a probe key"
        except MetadataError as error:
            is_good, reason = False, error.what
        row: dict[str, Any] = {"status": "ok" if is_good else "down", "store": store.url}
        row.update(round_trip_ms=round(1000 * (time.perf_counter() - started), 3)) if is_good else row.update(
            error=reason
        )
        return Reply(200 if is_good else 503, json.dumps(row).encode())


@lru_cache(maxsize=2048)
def _read_query(query: str) -> tuple[str, float | None, bool]:
    """The key, decoded, the ttl, and whether a value is wanted whatever it is. Raises ValueError with what is wrong."""
    if query.startswith("key=") and "&" not in query:  # all that the engine ever sends
        return _checked_key(unquote_plus(query[4:], errors="strict")), None, False
    fields = dict(parse_qsl(query, keep_blank_values=True, errors="strict"))
    if "key" not in fields:
        raise ValueError("there is no key")
    ttl_s = float(fields["ttl"]) if "ttl" in fields else None
    if ttl_s is not None and not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
        raise ValueError(f"ttl {ttl_s} is not a number of seconds above 0")
    return _checked_key(fields["key"]), ttl_s, "raw" in fields


def _checked_key(key: str) -> str:
    if not key:
        raise ValueError("the key is empty")
    if len(key) * 4 > MAX_KEY_BYTES and len(key.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"the key has more than {MAX_KEY_BYTES} bytes")
    return key
