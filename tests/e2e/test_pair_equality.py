"""Answers of a pair equal those of one plain instance, and decode computes no prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.pin.processes import Pair
from tests.e2e.agents import find_agent, first_difference, overwrite_byte, read_pool, wait_until
from tests.e2e.asking import ask, ask_all, content, counters, hits, misses, stream_all, token_prompt
from tests.e2e.conftest import make_pair
from tests.e2e.engine_suites import metric
from tests.quick import IN_ONE_PROCESS

LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 128, 129, 200, 255, 256, 300, 400, 512, 513, 640, 777)
LONG = (800, 900, 1000, 1024, 1100, 1280, 1500, 1777, 1999, 2000)
TEXTS = (
    "Hello",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Ein Satz mit Umlauten: ä ö ü ß, und dann 月餅。",
    "\n\n  leading and trailing space  ",
    "def f(x):\n    return x + 1\n" * 20,
)


def make_bodies(model: str, seed: int) -> list[dict[str, Any]]:
    """40 prompts: text and token ids, greedy, seeded, and four samples at once; logprobs everywhere."""
    prompts: list[Any] = [token_prompt(length, seed) for length in (*LENGTHS, *LONG)]
    prompts += [f"{seed} {text}" for text in TEXTS]
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.8, "seed": 11},
        {"temperature": 0.7, "seed": 5, "n": 4},
    )
    return [
        {"model": model, "prompt": prompt, "max_tokens": 8, "logprobs": 5, **kinds[index % len(kinds)]}
        for index, prompt in enumerate(prompts)
    ]


def assert_equal_and_all_hits(plain_url: str, pair: Pair, bodies: list[dict[str, Any]]) -> None:
    before = counters(pair)

    answers = [content(ask(pair.proxy_url, body)) for body in bodies]

    after = counters(pair)
    assert answers == [content(ask(plain_url, body)) for body in bodies]
    assert hits(after) - hits(before) == sum(body.get("n", 1) for body in bodies)
    assert misses(after) == misses(before)


def moved(found: dict[str, float]) -> float:
    """Entries that came to decode: read through the engine, or to be used in prefill's pool."""
    return found.get("received", 0.0) + found.get("mapped", 0.0)


def test_forty_prompts_over_http_metadata_and_equal_urls(plain_url: str, pair: Pair, tiny_model: str) -> None:
    assert_equal_and_all_hits(plain_url, pair, make_bodies(tiny_model, seed=1))


def test_forty_prompts_over_etcd_and_ports_100_apart_with_the_buffer_mapped(
    plain_url: str, tiny_model: str, etcd_url: str, tmp_path: Path
) -> None:
    pair = make_pair(tiny_model, tmp_path, etcd_url, "auto", IN_ONE_PROCESS)
    pair.write_config(decode_url=f"127.0.0.1:{pair.engine_port + 100}", metadata_backend="etcd")
    try:
        pair.start_all()
        pair.wait_connected()

        assert_equal_and_all_hits(plain_url, pair, make_bodies(tiny_model, seed=2))
        assert pair.agent_status("decode").transport == "shm"
        assert counters(pair).get("reads", 0.0) == 0
    finally:
        pair.stop_all()


def test_sixteen_clients_get_equal_answers_and_hits(plain_url: str, pair: Pair, tiny_model: str) -> None:
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
    bodies = [
        {"model": tiny_model, "prompt": token_prompt(5 + 17 * i, 3), "max_tokens": 8, "logprobs": 1, **kinds[i % 2]}
        for i in range(64)
    ]
    before, counted_before = counters(pair), counted_by_vllm(pair)

    answers = asyncio.run(ask_all(pair.proxy_url, bodies, clients=16))

    after, counted_after = counters(pair), counted_by_vllm(pair)
    assert [content(answer) for answer in answers] == [content(ask(plain_url, body)) for body in bodies]
    assert hits(after) - hits(before) >= 0.95 * len(bodies)
    assert after["filled_ahead"] - before.get("filled_ahead", 0.0) >= len(bodies) / 4  # joined others that were running
    prompt_tokens = sum(len(body["prompt"]) for body in bodies)
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert [new - old for new, old in zip(counted_after, counted_before)] == [64, prompt_tokens, tokens, tokens - 64]


def counted_by_vllm(pair: Pair) -> list[float]:
    """Decode's own metrics, of prompts that had a step of their own and of those that joined others."""
    names = ("time_to_first_token_seconds_count", "prompt_tokens_total", "generation_tokens_total")
    return [metric(pair.api_url("decode"), f"vllm:{name}") for name in (*names, "time_per_output_token_seconds_count")]


def test_streamed_text_is_the_text_of_one_piece(pair: Pair, tiny_model: str) -> None:
    """The pin alone swaps streamed tokens when loading took more than five seconds (vllm_plugin/output_reader.py)."""
    bodies = [
        {"model": tiny_model, "prompt": token_prompt(50 + i, 8), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        for i in range(8)
    ]

    streamed = asyncio.run(stream_all(pair.proxy_url, bodies))

    assert streamed == [ask(pair.proxy_url, body)["choices"][0]["text"] for body in bodies]


def test_identical_prompts_at_once_all_hit_and_are_moved_once(plain_url: str, pair: Pair, tiny_model: str) -> None:
    body = {"model": tiny_model, "prompt": token_prompt(700, 4), "max_tokens": 6, "temperature": 0, "logprobs": 1}
    before = counters(pair)

    answers = asyncio.run(ask_all(pair.proxy_url, [body] * 8, clients=8))

    after = counters(pair)
    expected = content(ask(plain_url, body))
    assert [content(answer) for answer in answers] == [expected] * 8
    assert hits(after) - hits(before) == 8
    assert moved(after) - moved(before) == 1


def test_chat_gives_the_same_text_as_a_plain_instance(plain_url: str, pair: Pair, tiny_model: str) -> None:
    body = {
        "model": tiny_model,
        "messages": [{"role": "user", "content": "What travels between two instances?"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    before = hits(counters(pair))

    answer = ask(pair.proxy_url, body, "/v1/chat/completions")

    expected = ask(plain_url, body, "/v1/chat/completions")
    assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
    assert hits(counters(pair)) - before == 1


@pytest.mark.parametrize("extra", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 2}], ids=["prompt", "echo"])
def test_prompt_logprobs_are_computed_by_decode(
    plain_url: str, pair: Pair, tiny_model: str, extra: dict[str, Any]
) -> None:
    body = {"model": tiny_model, "prompt": token_prompt(40, 5), "max_tokens": 4, "temperature": 0, **extra}

    answer = ask(pair.proxy_url, body)

    assert content(answer) == content(ask(plain_url, body))
    assert answer["choices"][0].get("prompt_logprobs") == ask(plain_url, body)["choices"][0].get("prompt_logprobs")


def test_one_corrupt_byte_in_a_stored_block_is_not_served(plain_url: str, pair: Pair, tiny_model: str) -> None:
    """Shows that the comparison above can fail: the bytes in the buffer are what decode uses."""
    body = {"model": tiny_model, "prompt": token_prompt(9, 6), "max_tokens": 8, "temperature": 0, "logprobs": 1}
    expected = content(ask(plain_url, body))
    holder = "prefill" if pair.agent_status("decode").transport == "shm" else "decode"
    agent = find_agent(pair.processes[holder].pid)
    before = read_pool(agent)
    received = moved(counters(pair))
    ask(pair.api_url("prefill"), {**body, "max_tokens": 1})
    wait_until(lambda: moved(counters(pair)) > received)

    overwrite_byte(agent, first_difference(before, agent))
    first_hits = hits(counters(pair))
    answer = ask(pair.api_url("decode"), body)

    assert hits(counters(pair)) - first_hits == 1
    assert content(answer) != expected
