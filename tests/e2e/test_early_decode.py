"""Decode gets its request together with prefill, on the real pin: held until the KV is there, in nobody's way."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.request
from typing import Any

import pytest

from mooncake_v0.handoff import GAUGE, HEADER, ID_BYTES, Handoff
from mooncake_v0.pin.processes import Pair
from tests.e2e.agents import wait_until
from tests.e2e.asking import ask, counters, texts, token_prompt
from tests.e2e.engine_suites import metric

WITHIN_S = 60  # a leg that is held so long has not been let through


class Leg:
    """A request to one instance, as the proxy would send it, in a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any], handoff: Handoff, path: str = "/v1/completions") -> None:
        self.texts: list[str] = []
        self._connection = http.client.HTTPConnection(url.partition("//")[2], timeout=WITHIN_S * 2)
        headers = {"content-type": "application/json", HEADER: handoff.header()}
        self._connection.request("POST", path, json.dumps(body), headers)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, AttributeError):
            self.texts = texts(json.loads(self._connection.getresponse().read()))

    @property
    def is_answered(self) -> bool:
        return bool(self.texts)

    def wait(self) -> list[str]:
        self._thread.join(WITHIN_S / 2)
        assert self.is_answered
        return self.texts

    def leave(self) -> None:
        """Close the connection, as a client does that has no more patience."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(2)
        self._thread.join(WITHIN_S / 2)


def handoff(within_s: int = WITHIN_S) -> Handoff:
    return Handoff(os.urandom(ID_BYTES), within_s)


def body(model: str, seed: int, length: int = 200) -> dict[str, Any]:
    return {"model": model, "prompt": token_prompt(length, seed), "max_tokens": 4, "temperature": 0}


def held(pair: Pair) -> int:
    ask(pair.api_url("decode"), {"model": pair.options.model, "prompt": [1], "max_tokens": 1})  # reports after a step
    return int(metric(pair.api_url("decode"), "vllm:num_requests_waiting"))


@pytest.fixture(scope="module")
def early_pair(pair: Pair) -> Pair:
    """The session's pair, once both instances say whose peer they are."""
    wait_until(lambda: all(metric(pair.api_url(role), GAUGE) == 1 for role in ("prefill", "decode")))
    return pair


def test_proxy_learns_that_the_pair_takes_both_legs_at_once(early_pair: Pair, tiny_model: str, plain_url: str) -> None:
    log = early_pair.options.folder / "proxy.log"
    wait_until(lambda: "takes requests together with prefill" in log.read_text())
    hits = counters(early_pair, "decode").get("hits", 0.0)

    for seed in range(500, 510):
        wanted = texts(ask(plain_url, body(tiny_model, seed)))
        assert texts(ask(early_pair.proxy_url, body(tiny_model, seed))) == wanted

    wait_until(lambda: counters(early_pair, "decode").get("hits", 0.0) == hits + 10)


def test_held_request_is_in_nobodys_way_and_takes_the_kv_when_it_comes(
    early_pair: Pair, tiny_model: str, plain_url: str
) -> None:
    one, hits = handoff(), counters(early_pair, "decode").get("hits", 0.0)
    leg = Leg(early_pair.api_url("decode"), body(tiny_model, 520), one)
    wait_until(lambda: held(early_pair) == 1)

    for seed in range(521, 525):
        assert texts(ask(early_pair.api_url("decode"), body(tiny_model, seed)))
    assert not leg.is_answered
    prefill = Leg(early_pair.api_url("prefill"), {**body(tiny_model, 520), "max_tokens": 1}, one)

    assert leg.wait() == texts(ask(plain_url, body(tiny_model, 520)))
    assert prefill.wait()
    wait_until(lambda: counters(early_pair, "decode").get("hits", 0.0) == hits + 1)


def test_held_request_computes_when_prefill_ends_with_other_kv(
    early_pair: Pair, tiny_model: str, plain_url: str
) -> None:
    one = handoff()
    leg = Leg(early_pair.api_url("decode"), body(tiny_model, 530), one)
    wait_until(lambda: held(early_pair) == 1)

    Leg(early_pair.api_url("prefill"), {**body(tiny_model, 531), "max_tokens": 1}, one).wait()

    assert leg.wait() == texts(ask(plain_url, body(tiny_model, 530)))


def test_held_request_computes_when_prefills_client_leaves(early_pair: Pair, tiny_model: str) -> None:
    one = handoff()
    leg = Leg(early_pair.api_url("decode"), body(tiny_model, 540), one)
    wait_until(lambda: held(early_pair) == 1)
    long = {**body(tiny_model, 541, length=8), "max_tokens": 4000, "ignore_eos": True}
    prefill = Leg(early_pair.api_url("prefill"), long, one)
    wait_until(lambda: metric(early_pair.api_url("prefill"), "vllm:num_requests_running") == 1)

    prefill.leave()

    assert leg.wait()


def test_held_request_is_forgotten_when_its_client_leaves(early_pair: Pair, tiny_model: str) -> None:
    leg = Leg(early_pair.api_url("decode"), body(tiny_model, 550), handoff(within_s=10_000))
    wait_until(lambda: held(early_pair) == 1)

    leg.leave()

    wait_until(lambda: held(early_pair) == 0)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
    ids=["completion", "chat"],
)
def test_answer_that_nobody_waits_for_is_not_generated_to_its_end(
    early_pair: Pair, tiny_model: str, path: str, prompt: dict[str, Any]
) -> None:
    url = early_pair.api_url("decode")
    before = metric(url, "vllm:generation_tokens_total")
    request = {"model": tiny_model, **prompt, "max_tokens": 3500, "ignore_eos": True}
    leg = Leg(url, request, handoff(within_s=0), path)
    wait_until(lambda: metric(url, "vllm:num_requests_running") == 1)

    leg.leave()

    wait_until(lambda: metric(url, "vllm:num_requests_running") == 0)
    assert metric(url, "vllm:generation_tokens_total") - before < 3500


def test_held_request_computes_when_its_time_is_over(early_pair: Pair, tiny_model: str) -> None:
    started = time.monotonic()
    leg = Leg(early_pair.api_url("decode"), body(tiny_model, 560), handoff(within_s=2))

    leg.wait()

    assert time.monotonic() - started >= 2


def test_header_that_is_no_handoff_changes_nothing(early_pair: Pair, tiny_model: str) -> None:
    request = urllib.request.Request(
        early_pair.api_url("decode") + "/v1/completions",
        json.dumps(body(tiny_model, 570)).encode(),
        {"content-type": "application/json", HEADER: "x" * 10_000},
    )
    with urllib.request.urlopen(request, timeout=WITHIN_S / 2) as answer:
        assert texts(json.load(answer))
