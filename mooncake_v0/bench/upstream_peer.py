"""Upstream's own V0 pipe for comparison: `SimpleBuffer` over `MooncakePipe`, as the wheel vllm 0.6.5 has them.

Started by `upstream` with the Python of an environment that holds that wheel, as ``PYTHON upstream_peer.py SOCKET_FD``;
this package need not be there. It keeps the types of upstream's connector: keys and values of all layers as
[layers, tokens, kv_heads, head_size], and the hidden states of all tokens. Answers the same one-object-a-line protocol as
the benchmark's own processes. Only names that Python 3.9 and vllm 0.6.5 have.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from typing import Any

ROLES = {"prefill": ("kv_producer", 0), "decode": ("kv_consumer", 1)}


class UpstreamPeer:
    """Commands are its public methods; times are CLOCK_MONOTONIC seconds."""

    def open(self, role: str, shape: dict[str, int], device: str) -> str:
        """Open the pipe; MOONCAKE_CONFIG_PATH names its configuration. Returns vLLM's version."""
        # upstream imports the adaptor as a module of its own; the engine's wheel has it inside its package
        sys.modules.setdefault("mooncake_vllm_adaptor", importlib.import_module("mooncake.mooncake_vllm_adaptor"))
        import torch
        import vllm.config
        from vllm.distributed.kv_transfer.kv_lookup_buffer.simple_buffer import SimpleBuffer
        from vllm.distributed.kv_transfer.kv_pipe.mooncake_pipe import MooncakePipe

        self.torch = torch
        self.shape = shape
        self.device = device
        kv_role, rank = ROLES[role]
        vllm_config: Any = vllm.config  # the pinned vllm, which the type checker sees, has no KVTransferConfig
        config = vllm_config.KVTransferConfig(
            kv_connector="MooncakeConnector", kv_role=kv_role, kv_rank=rank, kv_parallel_size=2, kv_buffer_device=device
        )
        pipe = MooncakePipe(local_rank=0, config=config)
        self.buffer = SimpleBuffer(pipe, pipe, 1e12)
        return str(vllm.__version__)

    def insert(self, tokens: int, seed: int) -> None:
        """What the producer's connector hands over after its gather."""
        torch, shape = self.torch, self.shape
        size = (shape["layers"], tokens, shape["kv_heads"], shape["head_size"])
        kinds = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
        dtype, hidden_dtype = kinds[shape["element_bytes"]], kinds[shape["hidden_element_bytes"]]
        key = torch.full(size, seed % 100, dtype=dtype, device=self.device)
        value = torch.full(size, seed % 100 + 1, dtype=dtype, device=self.device)
        hidden = torch.ones(tokens, shape["hidden_size"], dtype=hidden_dtype, device=self.device)
        self.buffer.insert(self._tokens(tokens, seed), self._roi(tokens), key, value, hidden)

    def drop_select(self, tokens: int, seed: int) -> dict[str, Any]:
        """From the consumer's request until keys, values and hidden states are here as tensors.

        seconds, and whether the bytes are those that were inserted: a managed buffer of the pinned engine between 128 and
        256 MiB is 128 MiB long, so that two of them overlap.
        """
        ids, roi = self._tokens(tokens, seed), self._roi(tokens)
        started_s = time.monotonic()
        found = self.buffer.drop_select(ids, roi)
        if self.device != "cpu":
            self.torch.cuda.synchronize()
        seconds = time.monotonic() - started_s
        if found[2] is None or found[3] is None:
            raise RuntimeError("the entry was not found")
        intact = all(bool((part == seed % 100 + at).all()) for at, part in enumerate(found[2:4]))
        return {"seconds": seconds, "intact": intact}

    def _tokens(self, tokens: int, seed: int) -> Any:
        return self.torch.arange(seed, seed + tokens)

    def _roi(self, tokens: int) -> Any:
        return self.torch.ones(tokens, dtype=self.torch.bool)


def main(argv: list[str]) -> None:
    """Answer commands until the parent is gone; then end at once: upstream's threads wait without a deadline."""
    sock = socket.socket(fileno=int(argv[0]))
    peer = UpstreamPeer()
    with sock.makefile("rb") as lines:
        for line in lines:
            command = json.loads(line)
            name = command.pop("do")
            try:
                answer = {"ok": getattr(peer, name)(**command)}
            except (ImportError, RuntimeError, ValueError, OSError, AttributeError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            sock.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
