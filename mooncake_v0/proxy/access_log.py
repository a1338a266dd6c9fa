"""One JSON line a request. No prompt, no key, no address of an instance ever goes in.

Lines are gathered in memory and written a few times a second by a thread: a busy disk can hold a write up for long,
and the event loop, with every stream in it, must not wait with it. When the disk does not keep up at all, lines are
left out, and a line says how many.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import Executor
from typing import IO

from mooncake_v0.proxy.record import Record

logger = logging.getLogger(__name__)

WAITING_LINES = 200_000


class AccessLog:
    """Writes lines to a file or stream; opened files can be opened anew after rotation."""

    def __init__(self, stream: IO[str] | None, path: str = "") -> None:
        self._stream = stream
        self._path = path
        self._lines: list[str] = []
        self._left_out = 0
        self._writing = threading.Lock()
        if path:
            self._open()

    def _open(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115  closed in `close`

    def reopen(self) -> None:
        """Open the path again (SIGHUP, after log rotation); a plain stream stays as it is."""
        if self._path:
            with self._writing:
                self._open()

    def write(self, record: Record) -> None:
        """Take a line; does not touch the stream."""
        if self._stream is None:
            return
        if len(self._lines) >= WAITING_LINES:
            self._left_out += 1
            return
        self._lines.append(json.dumps({"time": round(time.time(), 3), **record.log_fields()}) + "\n")

    def flush(self, executor: Executor) -> None:
        """Have what has gathered written, unless the last batch is still being written."""
        if self._lines and not self._writing.locked():
            executor.submit(self._write, self._take())

    def flush_now(self) -> None:
        """Write what has gathered and wait for it: at the end of the process."""
        self._write(self._take())

    def close(self) -> None:
        self.flush_now()
        if self._path and self._stream is not None:
            self._stream.close()

    def _take(self) -> list[str]:
        lines, self._lines = self._lines, []
        if self._left_out:
            lines.append(json.dumps({"time": round(time.time(), 3), "left_out": self._left_out}) + "\n")
            self._left_out = 0
        return lines

    def _write(self, lines: list[str]) -> None:
        try:
            with self._writing:
                if self._stream is not None:
                    self._stream.write("".join(lines))
                    self._stream.flush()
        except OSError as error:
            # a full disk, or a reader of stdout that has gone, must not end the service
            logger.error("%d lines of the access log are lost: %s", len(lines), error)
