"""What the buffer's bookkeeping costs: look-up, insert with eviction, and a step's plan with its round trip to the agent.

    python -m tests.soak.bookkeeping           exit code 1 if the cost grows with the number of entries

Look-up and insert, as the agents do them for a prompt, are timed at 10 to 100,000 entries in turns, so that noise on the
host hits all sizes; the ratio is that of the medians. The round trip is told beside a bare one: the same kind of socket
between two processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from array import array
from typing import Callable

from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.kv.connector import pack_block_ids
from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan, content_key, decode_plan, encode_plan
from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.pin.processes import find_free_range
from mooncake_v0.transfer.agent_client import AgentClient
from mooncake_v0.transfer.agent_settings import AgentSettings
from mooncake_v0.transfer.decode_side import DecodeSide
from mooncake_v0.transfer.lookup_buffer import HELD, Entry, LookupBuffer
from mooncake_v0.transfer.messages import Commit, ReadFailed, Release, Reserve, Reserved, Select, Selected
from mooncake_v0.transfer.peer import Peer
from mooncake_v0.transfer.pool import ALIGNMENT_BYTES, Pool
from mooncake_v0.transfer.prefill_side import PrefillSide

SIZES = (10, 1_000, 100_000)
ROUNDS = 30
CALLS = 500
RECENT = 1_000  # decode asks for what prefill has just stored, so the processor's caches hold it whatever else is there
MAX_RATIO = 2.0
PROMPT_TOKENS = 2_000
BLOCK_TOKENS = 16


class Side:
    """An agent's two roles over full buffers of so many entries, without sockets and engine."""

    def __init__(self, entries: int) -> None:
        self.newest = entries
        peer = Peer(up=True)
        pool = Pool.create(entries * ALIGNMENT_BYTES)
        nothing: Callable[[object], None] = lambda message: None  # noqa: E731
        held = LookupBuffer(pool.nbytes, ttl_s=1e9)
        self._decode = DecodeSide(
            held,
            peer,
            pool,
            send=nothing,
            submit=nothing,
            cancel=lambda transfer: [],
            hasher=None,
            may_stop_checking=False,
        )
        self._prefill = PrefillSide(LookupBuffer(pool.nbytes, ttl_s=1e9), peer, pool, send=nothing, hasher=None)
        for number in range(entries):
            entry = held.insert(key_of(number), ALIGNMENT_BYTES, 0.0)
            assert isinstance(entry, Entry)
            entry.state = HELD
            held.unpin(entry)
            self.store(number)

    def look_up(self, number: int) -> None:
        """As for a prompt that decode takes over: select, which pins, and release."""
        key = key_of(number)
        answers: list[object] = []
        self._decode.on_worker(Select(1, [key], 0.0), answers.append)
        assert isinstance(answers[0], Selected) and answers[0].offsets[0] >= 0
        self._decode.on_worker(Release([key]), answers.append)

    def store(self, number: int) -> None:
        """As for a prompt that prefill computes: reserve, which evicts, commit, and the peer's word that it is there."""
        key = key_of(number)
        answers: list[object] = []
        self._prefill.on_worker(Reserve(1, [key], [ALIGNMENT_BYTES]), answers.append)
        assert isinstance(answers[0], Reserved) and answers[0].offsets[0] >= 0, answers
        self._prefill.on_worker(Commit([key], [ALIGNMENT_BYTES]), answers.append)
        self._prefill.on_peer(ReadFailed(key, 0))


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def timed_us(calls: int, call: Callable[[int], object]) -> float:
    started = time.perf_counter()
    for number in range(calls):
        call(number)
    return (time.perf_counter() - started) / calls * 1e6


def by_size() -> dict[str, dict[int, float]]:
    """Microseconds a call: operation → number of entries → median."""
    sides = {size: Side(size) for size in SIZES}
    order = random.Random(1)
    found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in ("look-up", "insert")}
    for _ in range(ROUNDS):
        for size in order.sample(SIZES, len(SIZES)):
            side, recent = sides[size], min(size, RECENT)
            wanted = [size - 1 - order.randrange(recent) for _ in range(CALLS)]
            start, side.newest = side.newest, side.newest + CALLS
            found["look-up"][size].append(timed_us(CALLS, lambda number, s=side, w=wanted: s.look_up(w[number])))  # type: ignore[misc]
            found["insert"][size].append(timed_us(CALLS, lambda number, s=side, n=start: s.store(n + number)))  # type: ignore[misc]
    return {name: {size: statistics.median(rows) for size, rows in sizes.items()} for name, sizes in found.items()}


def echo(fd: int) -> None:
    with socket.socket(fileno=fd) as sock:
        while data := sock.recv(65536):
            sock.send(data)


def bare_round_trip_us() -> float:
    """The same kind of socket, the same size of message, and a process that only sends it back."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("fork").Process(target=echo, args=(os.dup(theirs.fileno()),))
    process.start()
    theirs.close()
    with ours:
        times = [timed_us(1, lambda number: (ours.send(bytes(60)), ours.recv(65536))) for _ in range(CALLS)]
        ours.shutdown(socket.SHUT_RDWR)
    process.join(10)
    return statistics.median(times)


def plan_us() -> float:
    """Key, block table and plan of one prompt, encoded for the other ranks and decoded there."""
    tokens = array("l", range(PROMPT_TOKENS))
    table = list(range(-(-PROMPT_TOKENS // BLOCK_TOKENS)))

    def plan(number: int) -> TransferPlan:
        key = content_key(b"fingerprint", b"", tokens)
        prompt = PromptPlan(key, pack_block_ids(table), 0, PROMPT_TOKENS - 1, PROMPT_TOKENS)
        return decode_plan(encode_plan(TransferPlan([prompt], PROMPT_TOKENS, True)))

    return statistics.median(timed_us(1, plan) for _ in range(CALLS))


def agent_round_trip_us() -> float:
    """Select of a key, answered at once by a real agent."""
    gateway = start_gateway_thread("memory:", is_private=False)
    base = find_free_range(150)
    config = MooncakeConfig(Endpoint("127.0.0.1", base), Endpoint("127.0.0.1", base + 100), gateway.url, "tcp")
    client = AgentClient(AgentSettings("decode", 0, 1, config, {"model": "m"}, 1 << 24))
    try:
        client.start()
        client.wait_started(60)
        return statistics.median(timed_us(1, lambda number: client.select([bytes(16)], 0.0)) for _ in range(CALLS))
    finally:
        client.close()
        gateway.close()


def main() -> int:
    costs = by_size()
    growth = {name: max(sizes.values()) / min(sizes.values()) for name, sizes in costs.items()}
    bare, plan, agent = bare_round_trip_us(), plan_us(), agent_round_trip_us()
    for name, sizes in costs.items():
        shown = ", ".join(f"{size:,} entries {cost:.2f} µs" for size, cost in sizes.items())
        print(f"{name:<8} {shown}: within {growth[name]:.2f}x")
    print(f"a step's plan for {PROMPT_TOKENS:,} tokens {plan:.0f} µs, round trip to the agent {agent:.0f} µs")
    print(f"together {plan + agent:.0f} µs, {(plan + agent) / bare:.1f}x a bare round trip of {bare:.0f} µs")
    print(json.dumps({"growth": growth, "plan_us": plan, "agent_us": agent, "bare_us": bare, "us": costs}))
    return int(max(growth.values()) > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
