"""Runs upstream's own V0 pipe beside ours: two processes of `upstream_peer` in an environment with vllm 0.6.5.

They use the same metadata server and loopback addresses. A pipe that breaks is not mended by upstream, so it is started
anew for the next size.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from mooncake_v0.bench import upstream_peer
from mooncake_v0.bench.child import Child
from mooncake_v0.bench.shapes import KVShape
from mooncake_v0.errors import CouldNotCheckError

OPEN_S = 120.0
MIN_RATE_BYTES_PER_S = 20e6  # slower than this, a transfer is given up
MEMORY_COPIES = 6  # a transfer keeps about that many times its KV in memory, on both sides together
_PYTHON_FIX = "give the Python of an environment that holds vllm 0.6.5 and mooncake-transfer-engine"
_TOKENS_APART = 1_000_001  # so that seeds differ modulo 100, which is what the keys are filled with


class UpstreamPipe:
    """`transfer` as often as wanted; `close` in every case."""

    def __init__(self, python: str, shape: KVShape, *, folder: Path, port: int, metadata_url: str, device: str) -> None:
        self._python = find_python(python)
        self._shape = shape
        self._folder = folder
        self._device = device
        self._children: dict[str, Child] = {}
        self._seed = 0
        self.version = ""
        self.wrong_bytes = False
        config = {
            "prefill_url": f"127.0.0.1:{port}",
            "decode_url": f"127.0.0.1:{port + 20}",
            "metadata_server": metadata_url,
            "protocol": "tcp",
            "device_name": "",
        }
        self._config_path = folder / "upstream.json"
        self._config_path.write_text(json.dumps(config))

    def transfer(self, tokens: int) -> float:
        """Seconds from drop_select to keys and values as tensors; CouldNotCheckError when the pipe breaks.

        `wrong_bytes` then tells whether they were other keys or values than were inserted.
        """
        if not self._children:
            self._open()
        self._seed += 1
        seed = self._seed * _TOKENS_APART
        timeout_s = 60.0 + tokens * self._shape.token_bytes / MIN_RATE_BYTES_PER_S
        try:
            self._children["prefill"].ask("insert", timeout_s, tokens=tokens, seed=seed)
            found = self._children["decode"].ask("drop_select", timeout_s, tokens=tokens, seed=seed)
        except CouldNotCheckError:
            self.close()
            raise
        self.wrong_bytes = not found["intact"]
        seconds: float = found["seconds"]
        return seconds

    def close(self) -> None:
        for child in self._children.values():
            child.stop()
        self._children = {}

    def _open(self) -> None:
        # the engine's own choice of address is the first network interface; the benchmark stays on loopback
        environment = {
            "MOONCAKE_CONFIG_PATH": str(self._config_path),
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "MC_LOG_LEVEL": "ERROR",
            "VLLM_PLUGINS": "",
            "no_proxy": "127.0.0.1,localhost",
        }
        for role in upstream_peer.ROLES:
            name = f"upstream {role}"
            log = self._folder / f"upstream-{role}.log"
            self._children[role] = Child(name, [self._python, upstream_peer.__file__], log, environment)
        shape = {key: value for key, value in asdict(self._shape).items() if key != "name"}
        try:
            for role, child in self._children.items():
                child.tell("open", role=role, shape=shape, device=self._device)
            for child in self._children.values():
                self.version = child.result(OPEN_S)
        except CouldNotCheckError as error:
            self.close()
            raise CouldNotCheckError(f"--peer-python {self._python}: {error.what}", fix=_PYTHON_FIX) from error


def find_python(python: str) -> str:
    """The path of --peer-python; CouldNotCheckError if there is no such program."""
    found = shutil.which(python)
    if found is None:
        raise CouldNotCheckError(f"--peer-python {python!r} is not a program", fix=_PYTHON_FIX)
    return found
