"""One JSON line a request. No prompt, no key, no address of an instance ever goes in."""

from __future__ import annotations

import json
import time
from typing import IO

from mooncake_v0.proxy.record import Record


class AccessLog:
    """Writes lines to a file or stream; opened files can be opened anew after rotation.

    Lines are buffered and flushed by the app a few times a second: one system call each would cost as much as a leg.
    """

    def __init__(self, stream: IO[str] | None, path: str = "") -> None:
        self._stream = stream
        self._path = path
        self._dirty = False
        if path:
            self.reopen()

    def reopen(self) -> None:
        """Open the path again (SIGHUP, after log rotation); a plain stream stays as it is."""
        if not self._path:
            return
        if self._stream is not None:
            self._stream.close()
        self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115  closed in `close`

    def write(self, record: Record) -> None:
        if self._stream is None:
            return
        line = {"time": round(time.time(), 3), **record.log_fields()}
        self._stream.write(json.dumps(line) + "\n")
        self._dirty = True

    def flush(self) -> None:
        if self._dirty and self._stream is not None:
            self._dirty = False
            self._stream.flush()

    def close(self) -> None:
        self.flush()
        if self._path and self._stream is not None:
            self._stream.close()
