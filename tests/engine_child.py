"""The pinned engine in a process of its own, driven by JSON lines: the client of the metadata and the reader tests.

python -m tests.engine_child   one request a line on standard input, one answer a line on standard output
{"do": "initialize", "name": …, "metadata": …}   {"do": "register", "size": n, "fill": byte, or "seed": of random bytes}
{"do": "unregister"}   {"do": "read", "name": …, "address": n, "size": n}   {"do": "exit"}
{"do": "target"}: what the last read's target holds by now
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import subprocess
import sys
from typing import Any

from tests.servers import answers

_PORTS = itertools.count(21000 + os.getpid() % 1000 * 10, 4)


def free_name() -> str:
    """A segment name whose two ports are free and below the range from which the system picks ports."""
    while True:
        port = 21000 + next(_PORTS) % 10000
        if not (answers(port) or answers(port + 1)):
            return f"127.0.0.1:{port}"


class Engine:
    """The parent's handle on a child. is_at_its_name: its ports are those of its name, else random ones of 127.0.0.1."""

    def __init__(self, *, is_at_its_name: bool = True) -> None:
        env = {**os.environ, "MC_LOG_LEVEL": "ERROR", "MC_TRANSFER_TIMEOUT": "5"}
        env.update({"MC_LEGACY_RPC_PORT_BINDING": "1"} if is_at_its_name else {"MC_TCP_BIND_ADDRESS": "127.0.0.1"})
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def ask(self, do: str, **fields: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the engine's process ended with {self.process.wait(10)} during {do}"
        return json.loads(line)["answer"]

    def leave(self) -> int:
        """End as a program ends: the engine's destructor runs."""
        if self.process.poll() is None:
            self.ask("exit")
        return self.process.wait(20)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


def main() -> None:
    from mooncake.engine import TransferEngine

    # the engine's library may write to standard output
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = TransferEngine()
    regions: list[ctypes.Array[ctypes.c_char]] = []
    targets: list[ctypes.Array[ctypes.c_char]] = []
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = answer(engine, regions, targets, request)
        except RuntimeError as error:
            found = ["exception", str(error)]
        out.write(json.dumps({"answer": found}) + "\n")
        out.flush()
        if request["do"] == "exit":
            break
    del engine


def answer(engine: Any, regions: list[Any], targets: list[Any], request: dict[str, Any]) -> object:
    do = request["do"]
    if do == "initialize":
        return engine.initialize(request["name"], request["metadata"], "tcp", "")
    if do == "register":
        region = (ctypes.c_char * request["size"]).from_buffer(content(request))
        regions.append(region)
        return [engine.register_memory(ctypes.addressof(region), request["size"]), ctypes.addressof(region)]
    if do == "unregister":
        return engine.unregister_memory(ctypes.addressof(regions[-1]))
    if do == "read":
        target = ctypes.create_string_buffer(request["size"])
        code = engine.transfer_sync_read(request["name"], ctypes.addressof(target), request["address"], request["size"])
        targets[:] = [target]
        return [code, target.raw.hex()]
    if do == "target":
        return targets[0].raw.hex()
    return None


def content(request: dict[str, Any]) -> bytearray:
    if "seed" in request:
        return bytearray(random.Random(request["seed"]).randbytes(request["size"]))
    return bytearray([request["fill"]]) * request["size"]


if __name__ == "__main__":
    main()
