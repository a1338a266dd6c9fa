"""Tensor parallel size 2 on both sides: one agent a rank, one decision for the group."""

from __future__ import annotations

from typing import Iterator

import psutil
import pytest

from mooncake_v0.pin.processes import Pair, find_free_port
from tests.e2e.asking import ask, content, hits, misses, token_prompt
from tests.e2e.conftest import make_pair
from tests.freezing import frozen
from tests.quick import IN_ONE_PROCESS, QUICK_START, python_path

TP_ENVIRONMENT = {
    **QUICK_START,
    "VLLM_CPU_OMP_THREADS_BIND": "all",
    "VLLM_NCCL_SO_PATH": "/nonexistent",
    "PYTHONPATH": python_path("quick_start", "stand_ins"),
}


@pytest.fixture(scope="module")
def tp_plain_and_pair(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Pair]]:
    pair = make_pair(tiny_model, tmp_path_factory.mktemp("tp"), more_args=IN_ONE_PROCESS, tp=2)
    pair.options.environment = TP_ENVIRONMENT
    try:
        port = find_free_port()
        plain = pair.start_plain(port)
        pair.start_all()
        pair.wait_ready(plain)
        pair.wait_connected()
        yield f"http://127.0.0.1:{port}", pair
    finally:
        pair.stop_all()


def rank_counters(pair: Pair, rank: int) -> dict[str, float]:
    return pair.agent_status("decode", rank).counters


def test_answers_equal_those_of_one_instance_and_both_ranks_hit(
    tp_plain_and_pair: tuple[str, Pair], tiny_model: str
) -> None:
    plain_url, pair = tp_plain_and_pair
    bodies = [
        {"model": tiny_model, "prompt": token_prompt(length, 30), "max_tokens": 8, "temperature": 0, "logprobs": 3}
        for length in (1, 15, 16, 17, 100, 257, 512, 1000, 2000)
    ]

    answers = [content(ask(pair.proxy_url, body)) for body in bodies]

    assert answers == [content(ask(plain_url, body)) for body in bodies]
    assert [hits(rank_counters(pair, rank)) for rank in (0, 1)] == [len(bodies)] * 2
    assert [misses(rank_counters(pair, rank)) for rank in (0, 1)] == [0, 0]


def test_an_entry_that_one_rank_lacks_is_recomputed_by_both(
    tp_plain_and_pair: tuple[str, Pair], tiny_model: str
) -> None:
    plain_url, pair = tp_plain_and_pair
    body = {"model": tiny_model, "prompt": token_prompt(300, 31), "max_tokens": 8, "temperature": 0, "logprobs": 3}
    ask(pair.api_url("prefill"), {**body, "max_tokens": 1})
    before = [misses(rank_counters(pair, rank)) for rank in (0, 1)]
    agents = [
        child
        for child in psutil.Process(pair.processes["decode"].pid).children(recursive=True)
        if "mooncake_v0.transfer.agent" in child.cmdline()
    ]
    second = pair.agent_status("decode", 1)
    port = second_rank_port(pair)
    (victim,) = [agent for agent in agents if port in {c.laddr.port for c in agent.net_connections("tcp")}]
    with frozen(victim.pid):  # one that is killed may be replaced, and its successor have the entry, in time
        answer = ask(pair.api_url("decode"), body)

    assert content(answer) == content(ask(plain_url, body))
    assert [misses(rank_counters(pair, 0)) - before[0]] == [1]
    pair.wait_connected()
    assert pair.agent_status("decode", 1).epoch != second.epoch


def second_rank_port(pair: Pair) -> int:
    """The side channel of decode's rank 1: base + 100 for equal URLs, + 32 + rank."""
    return pair.engine_port + 100 + 32 + 1
