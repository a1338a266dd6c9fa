"""Prefill's network namespace and the cable that joins it to this process's own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

from tests.soak.chaos.cable import open_tun

PREFILL_ADDRESS = "10.77.0.1"
DECODE_ADDRESS = "10.77.0.2"


class Link:
    """Both namespaces live as long as their processes: nothing is left of them afterwards, however the soak ends."""

    def __init__(self, seed: int) -> None:
        end = open_tun(DECODE_ADDRESS)
        command = ["unshare", "--net", "--", sys.executable, "-m", "tests.soak.chaos.cable"]
        self._process = subprocess.Popen(
            [*command, str(end), PREFILL_ADDRESS, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(end,),
            start_new_session=True,
        )
        os.close(end)
        self._expect("ready")

    @property
    def pid(self) -> int:
        return self._process.pid

    def enter(self) -> list[str]:
        """What to put before a command so that it runs in prefill's namespace."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", "--"]

    def set(self, **state: Any) -> None:
        """Change the cable: up, delay_ms, jitter_ms, loss (cable.CableState)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(state) + "\n")
        self._process.stdin.flush()
        self._expect("done")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.strip() != word:
            raise RuntimeError(f"the cable between the namespaces has ended: {line!r}")
