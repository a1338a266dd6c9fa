"""The store behind the metadata service: one small interface, one implementation per URL scheme.

The gateway, the agents' registry and `mooncake-v0 metadata` call it. Life cycle: `open_store(url)` connects lazily, so
a store that is down raises on the first call, not here; every call ends within the deadline given to `open_store` (a
list within `LIST_TIMEOUT_S`); a store survives an outage of its server by itself and is used until `close()`. All
stores are thread-safe and synchronous: the gateway runs them in threads, agents and the command line call them as they
are.

Keys are text, stored as UTF-8. Values are bytes; the engine's own are one line of JSON. Engine keys are
`mooncake/ram/<name>` and `mooncake/rpc_meta/<name>` (transfer engine 0.3.3.post2, transfer_metadata.cpp); ours live
under `mooncake-v0/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mooncake_v0.metadata.store_url import StoreURL, parse_store_url

DEFAULT_TIMEOUT_S = 2.0  # far below the engine's 3 s (CURLOPT_TIMEOUT_MS, transfer_metadata_plugin.cpp)
LIST_TIMEOUT_S = 10.0
PUT = "put"
DELETE = "delete"


@dataclass(frozen=True)
class Entry:
    """One key and its value."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Change:
    """One change seen by a watch; value is None for kind "delete"."""

    kind: str
    key: str
    value: bytes | None


class Watch(Protocol):
    """Changes under a prefix from the moment of the call on."""

    def next(self, timeout_s: float) -> Change | None:
        """The next change, or None when the time is over. Raises StoreUnavailableError when the watch is lost."""

    def close(self) -> None:
        """End the watch; may be called twice."""


class MetadataStore(Protocol):
    """Keys and values with deadlines. Every method raises StoreUnavailableError when the store does not answer in time.

    url is masked: it holds no password.
    """

    url: str

    def get(self, key: str) -> bytes | None:
        """The value, or None when the key does not exist."""

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        """Write or overwrite; returns when the store has acknowledged. With ttl_s the key vanishes after that long."""

    def delete(self, key: str, *, expected: bytes | None = None) -> bool:
        """Remove a key; True when it was there. With `expected`, only while its value is exactly that (atomic)."""

    def list(self, prefix: str) -> list[Entry]:
        """All entries whose key starts with prefix, sorted by key."""

    def watch(self, prefix: str) -> Watch:
        """Watch a prefix. Raises UnsupportedError where the store has no way to tell."""

    def close(self) -> None:
        """Release connections; the store is not used afterwards."""


def open_store(url: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, token: str | None = None) -> MetadataStore:
    """The store for a URL; see `store_url` for the forms. `token` is sent as a bearer token to an http store.

    Raises MetadataError for a URL of none of the forms, UnsupportedError for a library that is missing or too new.
    """
    address = parse_store_url(url)
    if address.kind in ("http", "https"):
        from mooncake_v0.metadata.http_store import HttpStore

        return HttpStore(address, timeout_s=timeout_s, token=token)
    return _open_direct(address, timeout_s)


def _open_direct(address: StoreURL, timeout_s: float) -> MetadataStore:
    # imported here: the light commands must not load grpc or redis when the store is another one
    if address.kind == "memory":
        from mooncake_v0.metadata.memory_store import MemoryStore

        return MemoryStore()
    if address.kind == "sqlite":
        from mooncake_v0.metadata.sqlite_store import SqliteStore

        return SqliteStore(address, timeout_s=timeout_s)
    if address.kind in ("etcd", "etcds"):
        from mooncake_v0.metadata.etcd_store import EtcdStore

        return EtcdStore(address, timeout_s=timeout_s)
    from mooncake_v0.metadata.redis_store import RedisStore

    return RedisStore(address, timeout_s=timeout_s)
