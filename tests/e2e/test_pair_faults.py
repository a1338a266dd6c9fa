"""Whatever dies or freezes under load: every request gets the right answer, and transfers resume by themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from mooncake_v0.pin.processes import Pair
from mooncake_v0.pin.tiny_model import make_tiny_model
from tests.e2e.agents import find_agent, wait_until
from tests.e2e.asking import ask, counters, hits, texts, token_prompt
from tests.e2e.conftest import VLLM_ARGS, make_pair
from tests.freezing import frozen
from tests.quick import IN_ONE_PROCESS

RESUME_S = 60.0


class Load:
    """Two clients that send known prompts through the proxy until stopped, and keep what was wrong."""

    def __init__(self, pair: Pair, model: str, expected: dict[int, list[str]]) -> None:
        self._pair, self._model, self._expected = pair, model, expected
        self.answered = 0
        self.wrong: list[Any] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(start,)) for start in (0, 7)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        self.wait_for(4)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def wait_for(self, more: int) -> None:
        until, deadline = self.answered + more, time.monotonic() + RESUME_S
        while self.answered < until:
            assert time.monotonic() < deadline, f"only {self.answered} of {until} answers; wrong: {self.wrong}"
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            number = (number + 1) % len(self._expected)
            try:
                got = texts(ask(self._pair.proxy_url, load_body(self._model, number)))
            except OSError as error:
                self.wrong.append((number, error))
                continue
            if got != self._expected[number]:
                self.wrong.append((number, got))
            self.answered += 1


def load_body(model: str, number: int) -> dict[str, Any]:
    return {"model": model, "prompt": token_prompt(60 + 37 * number, 50), "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def expected(plain_url: str, tiny_model: str) -> dict[int, list[str]]:
    return {number: texts(ask(plain_url, load_body(tiny_model, number))) for number in range(24)}


def wait_for_hit(pair: Pair, model: str, seed: int) -> None:
    """Until a fresh prompt is a hit again."""
    deadline = time.monotonic() + RESUME_S
    attempt = 0
    while time.monotonic() < deadline:
        attempt += 1
        body = {"model": model, "prompt": token_prompt(90 + attempt, seed), "max_tokens": 2, "temperature": 0}
        before = _hits_or_none(pair)
        ask(pair.proxy_url, body)
        after = _hits_or_none(pair)
        if before is not None and after is not None and after - before == 1:
            return
        time.sleep(0.5)
    raise AssertionError(f"no hit after {RESUME_S} s: {pair.agent_status('decode')}")


def _hits_or_none(pair: Pair) -> float | None:
    from mooncake_v0.errors import AgentUnavailableError

    try:
        return hits(counters(pair))
    except AgentUnavailableError:
        return None


def kill_prefill(pair: Pair) -> Callable[[], None]:
    os.kill(pair.processes["prefill"].pid, signal.SIGKILL)
    pair.stop("prefill")
    return lambda: pair.wait_ready(pair.start_instance("prefill"))


def kill_prefill_agent(pair: Pair) -> Callable[[], None]:
    find_agent(pair.processes["prefill"].pid).kill()
    return lambda: None


def kill_decode_agent(pair: Pair) -> Callable[[], None]:
    find_agent(pair.processes["decode"].pid).kill()
    return lambda: None


def kill_metadata(pair: Pair) -> Callable[[], None]:
    os.kill(pair.processes["metadata"].pid, signal.SIGKILL)
    pair.stop("metadata")
    return lambda: pair.wait_ready(pair.start_metadata())


KILLS = [kill_prefill_agent, kill_decode_agent, kill_metadata, kill_prefill]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.__name__)
def test_kill_9_under_load_loses_nothing_and_transfers_resume(
    pair: Pair, tiny_model: str, expected: dict[int, list[str]], kill: Callable[[Pair], Callable[[], None]]
) -> None:
    with Load(pair, tiny_model, expected) as load:
        restart = kill(pair)
        load.wait_for(10)
        restart()
        load.wait_for(6)

    assert load.wrong == []
    wait_for_hit(pair, tiny_model, seed=60 + KILLS.index(kill))


def test_both_agents_and_the_metadata_server_killed_at_once(
    pair: Pair, tiny_model: str, expected: dict[int, list[str]]
) -> None:
    with Load(pair, tiny_model, expected) as load:
        find_agent(pair.processes["prefill"].pid).kill()
        find_agent(pair.processes["decode"].pid).kill()
        restart = kill_metadata(pair)
        load.wait_for(6)
        restart()
        load.wait_for(4)

    assert load.wrong == []
    wait_for_hit(pair, tiny_model, seed=70)


def test_a_prompt_larger_than_the_buffer_is_answered_and_the_next_small_one_is_a_hit(
    plain_url: str, tiny_model: str, tmp_path: Path
) -> None:
    """2,000 tokens are 4 MB of KV; the buffer has 2 MB."""
    pair = make_pair(tiny_model, tmp_path, more_args=IN_ONE_PROCESS)
    pair.options.kv_buffer_size = 2e6
    large = {"model": tiny_model, "prompt": token_prompt(2000, 80), "max_tokens": 6, "temperature": 0}
    small = {"model": tiny_model, "prompt": token_prompt(100, 81), "max_tokens": 6, "temperature": 0}
    try:
        pair.start_all()
        pair.wait_connected()

        answer = ask(pair.proxy_url, large)
        after_large = counters(pair)
        small_answer = ask(pair.proxy_url, small)

        assert texts(answer) == texts(ask(plain_url, large))
        assert texts(small_answer) == texts(ask(plain_url, small))
        assert hits(after_large) == 0
        assert hits(counters(pair)) == 1
        lines = [line for line in log_lines(pair, "prefill") if "kv_buffer_size is" in line]
        assert len(lines) == 1
        assert "8193024 bytes" in lines[0] and "1998848 bytes" in lines[0]
    finally:
        pair.stop_all()


@pytest.fixture
def wide_pair(tmp_path: Path) -> Iterator[tuple[Pair, str]]:
    """A pair with a model whose KV is 48 KiB a token: 2,100 tokens are 100 MB."""
    from mooncake_v0.pin.environment import cache_folder

    model = str(make_tiny_model(cache_folder() / "wide-qwen2", layers=24, heads=8, kv_heads=8))
    pair = make_pair(model, tmp_path)
    pair.options.kv_buffer_size = 3e8
    pair.options.vllm_args = VLLM_ARGS
    try:
        pair.start_all()
        pair.wait_connected()
        yield pair, model
    finally:
        pair.stop_all()


def test_a_frozen_agent_during_a_100_mb_transfer_stops_nothing(wide_pair: tuple[Pair, str]) -> None:
    pair, model = wide_pair
    body = {"model": model, "prompt": token_prompt(2100, 90), "max_tokens": 4, "temperature": 0}
    agent = find_agent(pair.processes["prefill"].pid)
    slowest = 0.0
    answers: list[list[str]] = []
    thread = threading.Thread(target=lambda: answers.append(texts(ask(pair.proxy_url, body))))
    thread.start()
    wait_until(lambda: pair.agent_status("decode").buffer_bytes > 0)
    wait_until(lambda: counters(pair, "prefill").get("stored", 0.0) > 0)
    with frozen(agent.pid):
        while thread.is_alive():
            started = time.monotonic()
            assert pair.processes["decode"].is_ready()
            slowest = max(slowest, time.monotonic() - started)
            thread.join(0.2)

    assert slowest < 1.0
    repeated = texts(ask(pair.api_url("decode"), {**body, "prompt": body["prompt"]}))
    assert answers == [repeated]
    wait_for_hit(pair, model, seed=91)


def log_lines(pair: Pair, name: str) -> list[str]:
    return (pair.options.folder / f"{name}.log").read_text(errors="replace").splitlines()
