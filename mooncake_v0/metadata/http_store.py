"""Keys behind an http metadata server: our gateway, or the server in the engine's wheel.

Speaks the engine's wire contract (GET, PUT, DELETE on `URL?key=…`, success is 200) and the gateway's additions:
`/list`, `/watch`, `ttl`, and `If-Match` on a delete. The wheel's server has none of these: list and watch raise
UnsupportedError, a comparing delete compares and then deletes. Proxies in the environment are not used; redirects are
not followed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import socket
import ssl
import threading
from typing import Mapping, Optional
from urllib.parse import quote

import msgspec

from mooncake_v0.errors import MetadataError, StoreUnavailableError, UnsupportedError
from mooncake_v0.metadata.queue_watch import Offer, QueueWatch
from mooncake_v0.metadata.store import LIST_TIMEOUT_S, Change, Entry, Watch
from mooncake_v0.metadata.store_url import StoreURL

MAX_ERROR_CHARS = 500
WATCH_SILENCE_S = 45.0  # the gateway sends an empty line every 15 s


class _Row(msgspec.Struct, gc=False):
    """An entry in the answer of /list, as `entry_row` wrote it."""

    key: str
    value: Optional[str] = None
    value_base64: Optional[str] = None


class _Listed(msgspec.Struct):
    entries: list[_Row]


_LISTED = msgspec.json.Decoder(_Listed)


def _entry(row: _Row) -> Entry:
    if row.value is not None:
        return Entry(row.key, row.value.encode())
    return Entry(row.key, base64.b64decode(row.value_base64 or "", validate=True))


def value_tag(value: bytes) -> str:
    """The entity tag of a value, as `If-Match` carries it."""
    return '"' + hashlib.sha256(value).hexdigest() + '"'


class HttpStore:
    """One keep-alive connection per thread."""

    def __init__(self, address: StoreURL, *, timeout_s: float, token: str | None = None) -> None:
        self.url = str(address)
        self._host, self._port = address.hosts[0]
        self._path = address.path or "/metadata"
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._tls = _tls_context(address) if address.is_tls else None
        self._headers = _authorization(address, token)

    def get(self, key: str) -> bytes | None:
        status, body = self._request("GET", _query(key=key, raw="1"))
        if status == 404:
            return None
        self._require_ok(status, body)
        return body

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        query = _query(key=key) if ttl_s is None else _query(key=key, ttl=f"{ttl_s:g}")
        status, body = self._request("PUT", query, value, {"Content-Type": "application/json"})
        self._require_ok(status, body)

    def delete(self, key: str, *, expected: bytes | None = None) -> bool:
        headers: dict[str, str] = {}
        if expected is not None:
            if self.get(key) != expected:  # the wheel's server ignores If-Match
                return False
            headers["If-Match"] = value_tag(expected)
        status, body = self._request("DELETE", _query(key=key), headers=headers)
        if status in (404, 412):
            return False
        self._require_ok(status, body)
        return True

    def list(self, prefix: str) -> list[Entry]:
        status, body = self._request("GET", "/list" + _query(prefix=prefix), timeout_s=LIST_TIMEOUT_S)
        if status in (404, 405):
            raise self._no_extension("list its keys")
        self._require_ok(status, body)
        try:
            return [_entry(row) for row in _LISTED.decode(body).entries]
        except (msgspec.DecodeError, ValueError) as error:
            raise MetadataError(
                f"{self.url} answered something else than a list of keys: {error}", fix="check the URL"
            ) from error

    def watch(self, prefix: str) -> Watch:
        connection = self._connect(WATCH_SILENCE_S)
        try:
            connection.request("GET", self._path + "/watch" + _query(prefix=prefix), headers=self._headers)
            sock = connection.sock
            answer = connection.getresponse()
            if answer.status in (404, 405):
                raise self._no_extension("watch keys")
            if answer.status != 200:
                self._require_ok(answer.status, answer.read())
            answer.readline()  # the first line says that the watch has begun
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unavailable(error) from error

        def stop() -> None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
            connection.close()

        return QueueWatch(self.url, lambda offer: _read_changes(answer, offer), stop)

    def close(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def _request(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> tuple[int, bytes]:
        """One exchange; a kept connection that the server has closed meanwhile is opened again, once."""
        wanted_s = timeout_s or self._timeout_s
        for attempt in (1, 2):
            connection = getattr(self._local, "connection", None)
            is_fresh = connection is None
            if connection is None:
                connection = self._local.connection = self._connect(wanted_s)
            try:
                if connection.sock is not None:
                    connection.sock.settimeout(wanted_s)
                connection.request(method, self._path + target, body, {**self._headers, **(headers or {})})
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self._local.connection = None
                if is_fresh or attempt == 2 or isinstance(error, socket.timeout):
                    raise self._unavailable(error) from error
        raise AssertionError("unreachable: the loop returns or raises")

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        )
        with self._lock:
            self._connections.append(connection)
        return connection

    def _require_ok(self, status: int, body: bytes) -> None:
        if status == 200:
            return
        text, fix = _error_text(body)
        if status in (401, 403):
            raise MetadataError(
                f"{self.url} refused the login (http {status})", fix="give its token or user and password"
            )
        if status >= 500:
            raise StoreUnavailableError(
                f"{self.url} answered http {status}: {text}", fix=fix or "see that server's log"
            )
        raise MetadataError(
            f"{self.url} answered http {status}: {text}", fix=fix or "check the URL; the engine's path is /metadata"
        )

    def _unavailable(self, error: Exception) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"{self.url} cannot be reached: {str(error) or type(error).__name__}",
            fix="check that the metadata server runs, its host and its port",
        )

    def _no_extension(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the http server at {self.url} cannot {what}",
            fix="use `mooncake-v0 metadata serve` instead of the server in the engine's wheel",
        )


def _read_changes(answer: http.client.HTTPResponse, offer: Offer) -> str:
    try:
        while True:
            line = answer.readline()
            if not line:
                return "the server ended it"
            if line.strip():
                row = json.loads(line)
                offer(Change(row["kind"], row["key"], row_value(row)))
    except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
        # AttributeError: http.client's answer to a close from another thread
        return str(error) or type(error).__name__


def entry_row(entry: Entry) -> dict[str, str]:
    """An entry as JSON: a value that is not UTF-8 goes as `value_base64`."""
    return {"key": entry.key, **_value_field(entry.value)}


def change_row(change: Change) -> dict[str, str]:
    """A change as JSON, the same way."""
    return {"kind": change.kind, "key": change.key, **({} if change.value is None else _value_field(change.value))}


def _value_field(value: bytes) -> dict[str, str]:
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(value).decode()}


def row_value(row: Mapping[str, object]) -> bytes | None:
    """The value in a row of /list or /watch: text as `value`, anything else as `value_base64`."""
    if "value" in row:
        return str(row["value"]).encode()
    return base64.b64decode(str(row["value_base64"]), validate=True) if "value_base64" in row else None


def _error_text(body: bytes) -> tuple[str, str]:
    """What and fix from the gateway's JSON error; the text itself from any other server."""
    try:
        row = json.loads(body)
        return str(row["error"]), str(row["fix"])
    except (ValueError, KeyError, TypeError):
        return body[:MAX_ERROR_CHARS].decode("utf-8", "replace").strip(), ""


def _query(**fields: str) -> str:
    return "?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items())


def _authorization(address: StoreURL, token: str | None) -> dict[str, str]:
    if token is not None:
        return {"Authorization": f"Bearer {token}"}
    if address.user is None and address.password is None:
        return {}
    login = f"{address.user or ''}:{address.password or ''}".encode()
    return {"Authorization": "Basic " + base64.b64encode(login).decode()}


def _tls_context(address: StoreURL) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.ca)
        if address.cert is not None:
            context.load_cert_chain(address.cert, address.key)
    except OSError as error:
        raise MetadataError(
            f"TLS files of {address} could not be loaded: {error}", fix="check ca=, cert=, key="
        ) from error
    return context
