"""The sweep of `mooncake-v0 bench transfer`: our path, the raw engine, memcpy and upstream, round by round.

Each round of a prompt length measures all of them one after the other, so that noise on the host hits all; shares and
ratios are medians of the rounds' own ratios. A first, untimed round moves an entry from cache to cache and compares the
bytes on both sides. Two figures for our path::

    transfer         from the commit on prefill until the bytes are in decode's own memory: its pool, or its paged cache
                     where it maps the producer's pool (shm), which copies nothing before
    cache to cache   from the start of the gather on prefill until decode's paged cache is filled
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from mooncake_v0.bench.child import Child
from mooncake_v0.bench.shapes import BLOCK_TOKENS, KVShape
from mooncake_v0.bench.transfer_report import Report, Samples, make_report
from mooncake_v0.bench.upstream import MEMORY_COPIES, UpstreamPipe
from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.transfer.agent_settings import AUTO

DEFAULT_PROMPT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PORTS = 230  # in a row, free: our pair, the raw engines, upstream's pair
_RAW_ENGINE_OFFSET = 160
_UPSTREAM_OFFSET = 180
_DECODE_OFFSET = 100
_CONNECT_S = 90.0
_UPSTREAM_BUDGET_S = 12.0  # for one length: the first round always, further ones while it lasts
_SIDES = ("prefill", "decode")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TransferOptions:
    """What to measure. blocks: prompt lengths in blocks, ascending. device: "cpu", "cuda" or "cuda:0"."""

    shape: KVShape
    blocks: Sequence[int]
    transports: Sequence[str]
    base_port: int
    folder: Path
    rounds: int = 5
    checksum: str = AUTO
    device: str = "cpu"
    peer_python: str | None = None


def measure(options: TransferOptions, progress: Progress) -> Report:
    """Run a sweep for each transport. Raises CouldNotCheckError if a part of it cannot run, with the reason."""
    samples: list[Samples] = []
    notes: list[str] = []
    gateway = start_gateway_thread("memory:", is_private=False)
    steps = len(options.transports) * len(options.blocks) * (options.rounds + 1)
    done = 0
    upstream_version = ""
    try:
        for transport in options.transports:
            with _sweep(options, transport, gateway.url) as sweep:
                for blocks in options.blocks:
                    for text in sweep.measure(blocks):
                        progress(text, done, steps)
                        done += 1
                samples += sweep.samples
                notes += sweep.notes
                upstream_version = sweep.upstream.version if sweep.upstream else ""
    finally:
        gateway.close()
    progress("done", steps, steps)
    return make_report(options.shape, samples, _run(options, upstream_version), notes)


def lengths_that_fit(shape: KVShape, blocks: Sequence[int], device: str) -> list[int]:
    """Those of the lengths for which this host has memory: a pool on each side, and on the CPU also a cache on each."""
    copies = 4 if device == "cpu" else 2
    budget_bytes = available_bytes() * 0.85
    return [count for count in blocks if copies * shape.entry_bytes(count) <= budget_bytes]


def available_bytes() -> int:
    with open("/proc/meminfo") as meminfo:
        rows = dict(line.split(":", 1) for line in meminfo)
    return int(rows["MemAvailable"].split()[0]) * 1024


class Sweep:
    """One producer and one consumer over all lengths, with one transport."""

    def __init__(self, options: TransferOptions, transport: str, sides: dict[str, Child]) -> None:
        self.options = options
        self.samples: list[Samples] = []
        self.notes: list[str] = []
        self.upstream: UpstreamPipe | None = None
        self._asked_transport = transport
        self._prefill, self._decode = sides["prefill"], sides["decode"]
        self._source: dict[str, Any] = {}
        self._transport = ""

    def open(self, metadata_url: str) -> None:
        """Start both sides and wait until they have greeted each other."""
        options, base = self.options, self.options.base_port
        config = {
            "prefill": {"host": "127.0.0.1", "port": base},
            "decode": {"host": "127.0.0.1", "port": base + _DECODE_OFFSET},
            "metadata_server": metadata_url,
        }
        for at, side in enumerate((self._prefill, self._decode)):
            side.tell(
                "open",
                role=_SIDES[at],
                shape=asdict(options.shape),
                blocks=max(options.blocks),
                config=config,
                engine_port=base + _RAW_ENGINE_OFFSET + 2 * at,
                transport=self._asked_transport,
                checksum=options.checksum,
                device=options.device,
            )
        self._source = self._prefill.result(_CONNECT_S)
        self._decode.result(_CONNECT_S)
        self._wait_for_peer()
        self._prefill.ask("fill", _CONNECT_S, seed=1)
        if options.peer_python:
            self.upstream = UpstreamPipe(
                options.peer_python,
                options.shape,
                folder=options.folder,
                port=base + _UPSTREAM_OFFSET,
                metadata_url=metadata_url,
                device=options.device,
            )

    def measure(self, blocks: int) -> Iterator[str]:
        """All rounds of one length; yields what it is about to do."""
        tokens = blocks * BLOCK_TOKENS
        yield f"{tokens} tokens: comparing bytes"
        self._check_bytes(blocks)
        kv_bytes = blocks * self.options.shape.block_bytes
        samples = Samples(tokens, kv_bytes, self._transport)
        for number in range(self.options.rounds):
            yield f"{tokens} tokens: round {number + 1} of {self.options.rounds}"
            samples.engine_s.append(self._decode.ask("raw_read", nbytes=kv_bytes, **self._source))
            samples.transfer_s.append(self._move(blocks, "select", "commit"))
            samples.copy_s.append(self._decode.ask("copy", nbytes=kv_bytes))
            samples.cache_s.append(self._move(blocks, "receive", "store"))
            self._measure_upstream(samples)
        self.samples.append(samples)

    def close(self) -> None:
        if self.upstream is not None:
            self.upstream.close()

    def _move(self, blocks: int, receive: str, send: str) -> float:
        """One entry under a new key, with the consumer waiting for it; seconds."""
        key = secrets.token_hex(16)
        self._prefill.ask("reserve", key=key, blocks=blocks)
        self._decode.tell(receive, key=key, blocks=blocks)
        self._decode.wait_event("waiting")
        started_s: float = self._prefill.ask(send)
        ended_s: float = self._decode.result(120.0)
        return ended_s - started_s

    def _check_bytes(self, blocks: int) -> None:
        self._decode.ask("fill", _CONNECT_S, seed=0)
        self._move(blocks, "receive", "store")
        for side in (self._prefill, self._decode):
            side.tell("checksum", blocks=blocks)
        sent, received = self._prefill.result(_CONNECT_S), self._decode.result(_CONNECT_S)
        if sent != received:
            raise CouldNotCheckError(
                f"{blocks * BLOCK_TOKENS} tokens arrived with other bytes than were sent (crc32 {sent} and {received})",
                fix="report this: a transfer must never change a byte",
            )

    def _measure_upstream(self, samples: Samples) -> None:
        """Upstream's turn in a round, while memory and its share of the time last; a failure ends its turns."""
        if self.upstream is None or samples.upstream_failed or sum(samples.upstream_s) > _UPSTREAM_BUDGET_S:
            return
        needed_bytes, free_bytes = MEMORY_COPIES * samples.kv_bytes, available_bytes()
        if needed_bytes > free_bytes:
            samples.upstream_failed = True
            self._note(samples, f"needs {needed_bytes / 1e9:.1f} GB of memory, {free_bytes / 1e9:.1f} GB are free")
            return
        try:
            samples.upstream_s.append(self.upstream.transfer(samples.prompt_tokens))
        except CouldNotCheckError as error:
            if not self.upstream.version:  # it never worked: the environment is wrong, not this size
                raise
            samples.upstream_failed = True
            self._note(samples, error.what.split(";")[0])
            return
        if self.upstream.wrong_bytes:
            self._note(samples, "delivered other bytes than were sent")

    def _note(self, samples: Samples, text: str) -> None:
        note = f"upstream at {samples.prompt_tokens} tokens: {text}"
        if note not in self.notes:
            self.notes.append(note)

    def _wait_for_peer(self) -> None:
        until_s = time.monotonic() + _CONNECT_S
        for side in (self._prefill, self._decode):
            while not (found := side.ask("peer")):
                if time.monotonic() > until_s:
                    raise CouldNotCheckError(
                        "the two agents did not meet", fix=f"see the logs in {self.options.folder}"
                    )
                time.sleep(0.05)
            self._transport = found
        if self._asked_transport not in (AUTO, self._transport):
            raise CouldNotCheckError(
                f"the agents use {self._transport!r} where {self._asked_transport!r} was asked for",
                fix=f"see why in the logs in {self.options.folder}, or use --transport auto",
            )


@contextlib.contextmanager
def _sweep(options: TransferOptions, transport: str, metadata_url: str) -> Iterator[Sweep]:
    with contextlib.ExitStack() as stack:
        sides = {}
        for role in _SIDES:
            command = [sys.executable, "-m", "mooncake_v0.bench.worker"]
            log = options.folder / f"{transport}-{role}.log"
            sides[role] = Child(f"{role} side", command, log, {"OMP_NUM_THREADS": _threads()})
            stack.callback(sides[role].stop)
        sweep = Sweep(options, transport, sides)
        stack.callback(sweep.close)
        sweep.open(metadata_url)
        yield sweep


def _threads() -> str:
    """Of torch in each side: the two share the host, and threads of one that wait for a core of the other stall it."""
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // 2))


def _run(options: TransferOptions, upstream_version: str) -> dict[str, object]:
    """What the figures depend on."""
    return {
        "model_shape": options.shape.name,
        "token_bytes": options.shape.token_bytes,
        "device": options.device,
        "rounds": options.rounds,
        "checksum": options.checksum,
        "torch_threads": int(_threads()),
        "cpus": len(os.sched_getaffinity(0)),
        "upstream": f"vllm {upstream_version}" if upstream_version else None,
        "network": "loopback tcp",
    }
