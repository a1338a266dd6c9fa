"""What the engine does by itself, through a pair: other model shapes, preemption, requests whose client leaves.

Each `check_…` raises AssertionError. `tests.e2e.test_engine_steps` runs some of them, `python -m tests.soak.equality` all.
In float32, so that a prompt that is computed twice (preemption) gives the same tokens both times.
"""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Sequence

import aiohttp

from mooncake_v0.pin.processes import Pair, PairOptions, find_free_port
from tests.e2e.asking import ask, ask_all, content, counters, hits, misses, token_prompt
from tests.quick import IN_ONE_PROCESS, QUICK_START

VLLM_ARGS = ("--dtype", "float32", "--max-model-len", "1024", "--disable-log-requests", "--return-tokens-as-token-ids")
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 100, 129, 300, 900)
BUFFER_BYTES = 8e6
FEW_BLOCKS = ("--num-gpu-blocks-override", "100")  # 1,600 tokens
CLOSE = 1e-3  # of log probabilities: float32 through other kernels
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Servers:
    """One plain instance and one pair of one model."""

    model: str
    plain_url: str
    pair: Pair


@contextmanager
def serve(
    model: str, folder: Path, *, pair_args: Sequence[str] = (), plain_args: Sequence[str] = ()
) -> Iterator[Servers]:
    """All processes of both, started at once, ended in every case."""
    options = PairOptions(model, folder, kv_buffer_size=BUFFER_BYTES, vllm_args=VLLM_ARGS, environment=QUICK_START)
    pair = Pair(options)
    try:
        port = find_free_port()
        plain = pair.start_plain(port, [*IN_ONE_PROCESS, *plain_args])
        pair.options.vllm_args = [*VLLM_ARGS, *pair_args]
        pair.start_all()
        pair.wait_ready(plain)
        pair.wait_connected()
        yield Servers(model, f"http://127.0.0.1:{port}", pair)
    finally:
        pair.stop_all()


def body(servers: Servers, length: int, seed: int, max_tokens: int = 24) -> dict[str, Any]:
    return {
        "model": servers.model,
        "prompt": token_prompt(length, seed),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 3,
        "ignore_eos": True,
    }


def metric(url: str, name: str) -> float:
    """The sum of one of vLLM's metrics over its labels. An engine that has made no step yet shows none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(value) for value in values)


def preemptions(url: str) -> float:
    return metric(url, "vllm:num_preemptions_total")


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


# --- shapes of models -------------------------------------------------------------------------------------------------


def check_lengths(servers: Servers) -> None:
    """Prompts around block borders: equal answers, no prompt computed by decode."""
    assert_equal_without_computing(servers, [body(servers, length, seed=1) for length in LENGTHS])


def check_window(servers: Servers) -> None:
    """Answers that end within a window of 64 tokens, and two tokens after prompts beyond it that end before a block border.

    Elsewhere beyond a window the pin's CPU worker reads slots that nobody wrote, whatever an earlier request left in them
    (cpu_model_runner.py `_prepare_decode`: the last blocks of the table, but not from where the window begins), and a plain
    instance answers one prompt in two ways. GPU workers do not; for them see tests/transfer/test_engine_steps.py.
    """
    within = [body(servers, length, seed=1) for length in (1, 15, 16, 17, 40)]
    beyond = [body(servers, length, seed=1, max_tokens=2) for length in (79, 127, 303, 895)]
    assert_equal_without_computing(servers, within + beyond)


def assert_equal_without_computing(servers: Servers, bodies: Sequence[dict[str, Any]]) -> None:
    before = counters(servers.pair)

    answers = [content(ask(servers.pair.proxy_url, one)) for one in bodies]

    after = counters(servers.pair)
    assert answers == [content(ask(servers.plain_url, one)) for one in bodies]
    assert (hits(after) - hits(before), misses(after) - misses(before)) == (len(bodies), 0)


# --- preemption -------------------------------------------------------------------------------------------------------


def long_bodies(servers: Servers, seed: int) -> list[dict[str, Any]]:
    """Ten requests that end with 3,000 tokens of KV, where 1,600 fit."""
    return [body(servers, 60 + 11 * number, seed, max_tokens=190) for number in range(10)]


def check_preemption_on_decode(servers: Servers) -> None:
    decode_url, bodies = servers.pair.api_url("decode"), long_bodies(servers, seed=2)
    before, preempted = counters(servers.pair), preemptions(decode_url)

    answers = asyncio.run(ask_all(servers.pair.proxy_url, bodies, clients=10))

    after = counters(servers.pair)
    assert preemptions(decode_url) > preempted, "decode preempted nothing"
    assert_near(answers, [ask(servers.plain_url, one) for one in bodies])
    # a prompt in one batch with a preempted request is computed with it
    looked_up = hits(after) - hits(before), misses(after) - misses(before)
    assert sum(looked_up) == len(bodies) and looked_up[0] > 0, looked_up


def check_preemption_on_prefill(servers: Servers) -> None:
    """Prefill serves long answers of its own and preempts them; what it stored of their prompts is right."""
    prefill_url, bodies = servers.pair.api_url("prefill"), long_bodies(servers, seed=3)
    preempted = preemptions(prefill_url)

    answers = asyncio.run(ask_all(prefill_url, bodies, clients=10))

    assert preemptions(prefill_url) > preempted, "prefill preempted nothing"
    expected = [ask(servers.plain_url, one) for one in bodies]
    assert_near(answers, expected)
    before = hits(counters(servers.pair))
    assert_near([ask(servers.pair.api_url("decode"), one) for one in bodies], expected)
    assert hits(counters(servers.pair)) - before == len(bodies)


def assert_near(answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Equal tokens with equal log probabilities; where two tokens tie, either may come, and the comparison ends."""
    compared = 0
    for answer, wanted in zip(answers, expected):
        got, want = answer["choices"][0]["logprobs"], wanted["choices"][0]["logprobs"]
        for step, best in enumerate(want["top_logprobs"]):
            first, second = sorted(best.values(), reverse=True)[:2]
            if got["tokens"][step] != want["tokens"][step] and first - second < CLOSE:
                break
            assert got["tokens"][step] == want["tokens"][step], (step, got["tokens"], want["tokens"])
            assert abs(got["token_logprobs"][step] - want["token_logprobs"][step]) < CLOSE
            compared += 1
    assert compared > sum(len(wanted["choices"][0]["logprobs"]["tokens"]) for wanted in expected) / 2


# --- clients that leave -----------------------------------------------------------------------------------------------


@dataclass
class Cut:
    """Requests of which some are cut off: how many, and the answers of the others with their bodies."""

    aborted: int
    answered: list[tuple[dict[str, Any], dict[str, Any]]]


def check_aborts(servers: Servers, *, requests: int = 40, seed: int = 4) -> None:
    """Clients leave at random moments; afterwards nothing is left of them on either side, and the next prompts are hits."""
    cut = asyncio.run(_ask_and_leave(servers, requests, random.Random(seed)))

    assert cut.aborted > requests / 4
    for asked, answer in cut.answered:
        assert answer["choices"][0]["text"] == ask(servers.plain_url, asked)["choices"][0]["text"]
    for role in ("prefill", "decode"):
        wait_until_idle(servers, role)
    assert_buffers_are_free(servers, seed)


def check_many_aborts(servers: Servers) -> None:
    check_aborts(servers, requests=200, seed=6)


async def _ask_and_leave(servers: Servers, requests: int, chance: random.Random) -> Cut:
    """Eight clients; each goes up to 0.4 s after it has asked for an answer that takes longer."""
    limit, cut = asyncio.Semaphore(8), Cut(0, [])
    urls = [servers.pair.proxy_url] * 4 + [servers.pair.api_url("decode"), servers.pair.api_url("prefill")]

    async def one(number: int) -> None:
        asked = body(servers, chance.randint(1, 700), 1000 + number, max_tokens=chance.choice((1, 300, 300, 300)))
        asked |= {"stream": chance.random() < 0.5, "logprobs": None}
        url, patience_s = chance.choice(urls), chance.uniform(0, 0.4)
        async with limit:
            try:
                answer = await asyncio.wait_for(_read(url, asked), patience_s)
            except asyncio.TimeoutError:
                cut.aborted += 1
                return
        if answer is not None:
            cut.answered.append((asked, answer))

    await asyncio.gather(*(one(number) for number in range(requests)))
    return cut


async def _read(url: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The answer in one piece, or None for one that was streamed to its end. Cancelled, the connection closes."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=asked) as response:
        assert response.status == 200, await response.text()
        if not asked["stream"]:
            answer: dict[str, Any] = await response.json()
            return answer
        async for _ in response.content:
            pass
        return None


def wait_until_idle(servers: Servers, role: str) -> None:
    """No request runs or waits, and every block of the KV cache is free."""
    url = servers.pair.api_url(role)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc")

    def is_idle() -> bool:
        ask(url, body(servers, 3, seed=5, max_tokens=1))  # the engine reports after a step
        return all(metric(url, name) == 0 for name in names)

    wait_for(is_idle, f"{role} still has requests of clients that left")


def assert_buffers_are_free(servers: Servers, seed: int) -> None:
    """Nine fresh prompts, 7 of 8 MB, find room beside what is left, soon: what an offer pins, it pins for half a minute."""
    pair, rounds = servers.pair, 0
    asked: list[dict[str, Any]] = []
    answers: list[Any] = []

    def all_hit() -> bool:
        nonlocal rounds, asked, answers
        rounds += 1
        asked = [body(servers, 250, 10_000 * seed + 9 * rounds + number, max_tokens=2) for number in range(9)]
        before = hits(counters(pair))
        answers = [content(ask(pair.proxy_url, one)) for one in asked]
        assert [content(ask(pair.api_url("decode"), one)) for one in asked] == answers
        return hits(counters(pair)) - before == 18

    wait_for(all_hit, "a buffer still holds entries of clients that left")
    assert answers == [content(ask(servers.plain_url, one)) for one in asked]
