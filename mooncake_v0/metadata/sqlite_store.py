"""Keys in one sqlite file: a metadata service that survives its own restart, on one host.

Several gateways on that host may share the file (write-ahead log). `synchronous=FULL`: a put that returned is on the
disk. A full disk or a damaged file fails that call with a MetadataError and leaves the store usable.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from mooncake_v0.errors import MetadataError, StoreUnavailableError
from mooncake_v0.metadata.polling_watch import PollingWatch
from mooncake_v0.metadata.store import Entry, Watch
from mooncake_v0.metadata.store_url import StoreURL

SCHEMA = "CREATE TABLE IF NOT EXISTS entries (key BLOB PRIMARY KEY, value BLOB NOT NULL, expires_at REAL) WITHOUT ROWID"
LIVE = "(expires_at IS NULL OR expires_at > ?)"


class SqliteStore:
    """One connection per thread; sqlite itself orders the writers."""

    def __init__(self, address: StoreURL, *, timeout_s: float) -> None:
        self.url = str(address)
        self._file = Path(address.path).absolute()
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        if not self._file.parent.is_dir():
            raise MetadataError(
                f"the folder {str(self._file.parent)!r} of the sqlite store does not exist",
                fix="create it; an absolute path has four slashes: sqlite:////var/lib/mooncake/metadata.db",
            )

    def get(self, key: str) -> bytes | None:
        with self._connection() as connection:
            row = connection.execute(
                f"SELECT value FROM entries WHERE key = ? AND {LIVE}", (key.encode(), time.time())
            ).fetchone()
        return None if row is None else bytes(row[0])

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        now = time.time()
        with self._connection() as connection:
            connection.execute(
                "INSERT INTO entries VALUES (?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at",
                (key.encode(), value, None if ttl_s is None else now + ttl_s),
            )
            if ttl_s is not None:
                connection.execute("DELETE FROM entries WHERE expires_at <= ?", (now,))

    def delete(self, key: str, *, expected: bytes | None = None) -> bool:
        where, values = f"key = ? AND {LIVE}", [key.encode(), time.time()]
        if expected is not None:
            where, values = where + " AND value = ?", [*values, expected]
        with self._connection() as connection:
            return connection.execute(f"DELETE FROM entries WHERE {where}", values).rowcount > 0

    def list(self, prefix: str) -> list[Entry]:
        low = prefix.encode()
        with self._connection() as connection:
            # keys are UTF-8, so no key has the byte 0xff: it ends the range
            rows = connection.execute(
                f"SELECT key, value FROM entries WHERE key >= ? AND key < ? AND {LIVE} ORDER BY key",
                (low, low + b"\xff", time.time()),
            ).fetchall()
        return [Entry(bytes(key).decode(), bytes(value)) for key, value in rows]

    def watch(self, prefix: str) -> Watch:
        return PollingWatch(self, prefix)

    def close(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = self._connect()
            with connection:
                yield connection
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _connect(self) -> sqlite3.Connection:
        # check_same_thread=False only so that close() may close the other threads' connections
        connection = sqlite3.connect(str(self._file), timeout=self._timeout_s, check_same_thread=False)
        with self._lock:
            self._connections.append(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(SCHEMA)
        return connection

    def _translated(self, error: sqlite3.Error) -> MetadataError:
        text = str(error)
        if "locked" in text:
            return StoreUnavailableError(
                f"sqlite store {str(self._file)!r} was locked for {self._timeout_s:g} s",
                fix="end the process that holds it, or give each service its own file",
            )
        if "full" in text or "disk I/O" in text:
            return MetadataError(
                f"sqlite store {str(self._file)!r} could not be written: {text}", fix="make room on its disk"
            )
        return MetadataError(
            f"sqlite store {str(self._file)!r} failed: {text}",
            fix="check the path and its permissions; a damaged file can be moved away, agents publish again",
        )
