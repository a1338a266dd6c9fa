"""Keys in redis: one server, Sentinel or Cluster, with ACL user, password, TLS and database number (redis-py).

Keys are plain strings under their own names, as Mooncake's source builds with redis write them, so both can share a
database. The commands an ACL user needs: get, set, del, scan, mget, ping, eval (for a delete that compares).
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from mooncake_v0.digits import number
from mooncake_v0.errors import MetadataError, StoreUnavailableError
from mooncake_v0.metadata.polling_watch import PollingWatch
from mooncake_v0.metadata.store import Entry, Watch
from mooncake_v0.metadata.store_url import StoreURL

SCAN_COUNT = 1000
MAX_CONNECTIONS = 64
COMPARE_AND_DELETE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


class RedisStore:
    """A redis-py client with short timeouts. A dropped connection is opened again, once per call."""

    def __init__(self, address: StoreURL, *, timeout_s: float) -> None:
        self.url = str(address)
        self._address = address
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened: Any = None
        _check_path(address)

    @property
    def _client(self) -> Any:
        # opened on the first call: a cluster's client connects when it is made
        with self._lock:
            if self._opened is None:
                self._opened = _client(self._address, self._timeout_s)
            return self._opened

    def get(self, key: str) -> bytes | None:
        with self._errors():
            value: bytes | None = self._client.get(key.encode())
        return value

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        with self._errors():
            self._client.set(key.encode(), value, px=None if ttl_s is None else max(1, round(ttl_s * 1000)))

    def delete(self, key: str, *, expected: bytes | None = None) -> bool:
        with self._errors():
            if expected is None:
                return int(self._client.delete(key.encode())) > 0
            return int(self._client.eval(COMPARE_AND_DELETE, 1, key.encode(), expected)) > 0

    def list(self, prefix: str) -> list[Entry]:
        pattern = _glob_escaped(prefix.encode()) + b"*"
        entries: dict[str, bytes] = {}
        with self._errors():
            batch: Any = []
            keys: Iterator[bytes] = self._client.scan_iter(match=pattern, count=SCAN_COUNT)
            for key in keys:
                batch.append(key)
                if len(batch) == SCAN_COUNT:
                    self._fetch(batch, entries)
                    batch = []
            self._fetch(batch, entries)
        return [Entry(key, entries[key]) for key in sorted(entries)]

    def watch(self, prefix: str) -> Watch:
        # keyspace notifications need a server setting that a shared redis seldom has
        return PollingWatch(self, prefix)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    def _fetch(self, keys: Sequence[bytes], entries: dict[str, bytes]) -> None:
        if not keys:
            return
        many = getattr(self._client, "mget_nonatomic", self._client.mget)  # a cluster's keys lie in several slots
        for key, value in zip(keys, many(keys)):
            if value is not None:  # deleted or expired since the scan
                entries[key.decode("utf-8", "replace")] = value

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (AuthenticationError, NoPermissionError) as error:
            raise MetadataError(
                f"{self.url} refused the login or the command: {error}",
                fix="check user and password, and that the ACL allows get, set, del, scan, mget, eval on mooncake*",
            ) from error
        except MasterNotFoundError as error:
            # its text is not passed on: in some versions of redis-py it holds the password
            raise self._no_master("AuthenticationError" in str(error)) from None
        except TimeoutError as error:
            raise StoreUnavailableError(
                f"{self.url} did not answer within {self._timeout_s:g} s", fix="check that redis runs and is reachable"
            ) from error
        except (ConnectionError, RedisClusterException, OSError) as error:
            raise StoreUnavailableError(
                f"{self.url} cannot be reached: {error}", fix="check that redis runs and is reachable"
            ) from error
        except RedisError as error:
            raise MetadataError(f"{self.url} answered with an error: {error}", fix="see the redis log") from error

    def _no_master(self, is_login: bool) -> MetadataError:
        if is_login:
            return MetadataError(
                f"the sentinels of {self.url} refused the login",
                fix="give theirs: ?sentinel_user=NAME&sentinel_password_file=FILE",
            )
        return StoreUnavailableError(
            f"{self.url} cannot be reached: no sentinel knows a master for that name",
            fix="check the service's name, and that redis and its sentinels run",
        )


def _client(address: StoreURL, timeout_s: float) -> Any:
    options = _connection_options(address, timeout_s / 2)
    login: dict[str, Any] = {"username": address.user, "password": address.password}
    if address.family == "redis+cluster":
        cluster: Any = redis.cluster
        nodes = [cluster.ClusterNode(host, port) for host, port in address.hosts]
        return redis.RedisCluster(startup_nodes=nodes, **login, **options)
    service, db = _check_path(address)
    of_server = {**login, **options, "db": db, "max_connections": MAX_CONNECTIONS}
    if address.family == "redis+sentinel":
        # all sentinels are asked in turn: they share the time
        of_sentinel = _connection_options(address, timeout_s / 2 / len(address.hosts))
        of_sentinel.update(username=address.sentinel_user, password=address.sentinel_password)
        sentinel_module: Any = redis.sentinel
        sentinel: Any = sentinel_module.Sentinel(list(address.hosts), sentinel_kwargs=of_sentinel)
        return sentinel.master_for(service, **of_server)
    host, port = address.hosts[0]
    return redis.Redis(host=host, port=port, **of_server)


def _connection_options(address: StoreURL, timeout_s: float) -> dict[str, Any]:
    # one retry on a dropped connection (server restarted); none on a timeout, which has used up the time
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
    }
    if address.is_tls:
        options.update(ssl=True, ssl_ca_certs=address.ca, ssl_certfile=address.cert, ssl_keyfile=address.key)
    return options


def _check_path(address: StoreURL) -> tuple[str, int]:
    """Service name (Sentinel only, else empty) and database number from the URL's path."""
    service, db = "", address.path
    if address.family == "redis+sentinel":
        service, _, db = address.path.partition("/")
        if not service:
            raise MetadataError(f"{address} names no service", fix="write redis+sentinel://HOST:26379/SERVICE[/DB]")
    database = number(db or "0")
    if database is None or (db and address.family == "redis+cluster"):
        raise MetadataError(
            f"{address} has database {db!r}", fix="a redis database is a number, usually 0..15; a cluster has only one"
        )
    return service, database


def _glob_escaped(prefix: bytes) -> bytes:
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\" else bytes([c]) for c in prefix)
