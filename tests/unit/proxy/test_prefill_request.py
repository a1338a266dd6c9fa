"""What prefill is sent, and which requests skip it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_v0.proxy.prefill_request import CHAT, COMPLETIONS, RequestPlan, plan_request


def plan(fields: Any, path: str = COMPLETIONS, content_type: str = "application/json", **options: int) -> RequestPlan:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return plan_request(path, content_type, body, **options)


BASE = {"model": "m", "prompt": "hello"}
CHAT_BASE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_copy_asks_for_one_token_of_one_sequence() -> None:
    fields = {**BASE, "max_tokens": 500, "min_tokens": 100, "n": 4, "best_of": 4, "stream": False, "logprobs": 5}

    sent = json.loads(plan(fields).prefill_body or b"")

    assert sent == {**BASE, "max_tokens": 1}


def test_chat_copy_caps_both_limits() -> None:
    sent = json.loads(plan({**CHAT_BASE, "max_completion_tokens": 500}, CHAT).prefill_body or b"")

    assert sent == {**CHAT_BASE, "max_tokens": 1}


def test_sampling_fields_stay_so_that_both_legs_refuse_alike() -> None:
    fields = {**BASE, "temperature": -1, "top_p": 9, "seed": 10**30, "logit_bias": {"1": 2}, "stop": ""}

    assert json.loads(plan(fields).prefill_body or b"") == {**fields, "max_tokens": 1}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{bad", "application/json"),
        (b"[1]", "application/json"),
        (b"", "application/json"),
        (b"null", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"model":"m","prompt":"x"}', "text/plain"),
        (b'{"model":"m","prompt":"x","seed":' + b"9" * 5000 + b"}", "application/json"),
    ],
)
def test_body_that_is_no_request_is_left_to_decode_to_refuse(body: bytes, content_type: str) -> None:
    assert plan(body, content_type=content_type).reason == "invalid"


@pytest.mark.parametrize("content_type", ["", "application/json; charset=utf-8", "application/vnd.api+json"])
def test_content_types_that_fastapi_reads_as_json(content_type: str) -> None:
    assert plan(BASE, content_type=content_type).prefill_body is not None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {**BASE, "prompt_logprobs": 0}),
        (COMPLETIONS, {**BASE, "echo": True, "logprobs": 0}),
        (COMPLETIONS, {**BASE, "use_beam_search": True, "n": 2}),
        (CHAT, {**CHAT_BASE, "echo": True}),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ],
)
def test_what_the_connector_does_not_serve_goes_to_decode_alone(path: str, fields: Any) -> None:
    assert plan(fields, path).reason == "not_from_kv"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {**BASE, "echo": True}),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        (CHAT, {"model": "m", "messages": 5}),
        (CHAT, {"model": "m", "messages": [5, None, {"content": 3}]}),
    ],
)
def test_everything_else_goes_through_prefill(path: str, fields: Any) -> None:
    assert plan(fields, path).prefill_body is not None


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"model": "m", "prompt": [1] * 84, "max_tokens": 16}, True),
        ({"model": "m", "prompt": [1] * 85, "max_tokens": 16}, False),
        ({"model": "m", "prompt": [[1], [1] * 85], "max_tokens": 16}, False),
        ({"model": "m", "prompt": [1] * 85, "max_tokens": 16, "truncate_prompt_tokens": 9}, True),
        ({"model": "m", "prompt": "x", "max_tokens": 100}, False),
        ({"model": "m", "prompt": "x", "max_tokens": 99}, True),
    ],
)
def test_prompt_that_cannot_fit_the_context_skips_prefill(fields: Any, fits: bool) -> None:
    assert (plan(fields, max_model_len=100).prefill_body is not None) is fits


@pytest.mark.parametrize(
    ("text_bytes", "max_tokens", "asked"),
    [(50, 16, False), (900, 16, True), (900, 90, True), (240, 8, False), (10_000, 1, True)],
)
def test_text_that_may_not_fit_is_counted_by_decode(text_bytes: int, max_tokens: int, asked: bool) -> None:
    fields = {"model": "m", "prompt": "x" * text_bytes, "max_tokens": max_tokens}

    assert (plan(fields, max_model_len=100).tokenize_body is not None) is asked


def test_same_prompt_has_the_same_key_whatever_is_asked_of_it() -> None:
    keys = {
        plan({**BASE, "n": 2, "temperature": 0.5}).prompt_key,
        plan({**BASE, "stream": True, "max_tokens": 9}).prompt_key,
        plan(BASE).prompt_key,
    }
    others = {
        plan({**BASE, "prompt": "hello!"}).prompt_key,
        plan({**BASE, "model": "lora"}).prompt_key,
        plan({**BASE, "add_special_tokens": False}).prompt_key,
    }

    assert len(keys) == 1
    assert len(others) == 3
    assert not keys & others


@pytest.mark.parametrize(("prompt", "tokens"), [([1, 2, 3], 3), ([[1], [2, 3]], 3), ("x" * 400, 101), (["abcd"], 2)])
def test_prompt_tokens_are_exact_for_ids_and_estimated_for_text(prompt: Any, tokens: int) -> None:
    assert plan({"model": "m", "prompt": prompt}).prompt_tokens == tokens


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = """
n best_of max_tokens min_tokens max_completion_tokens stream stream_options logprobs top_logprobs prompt_logprobs echo
use_beam_search temperature prompt messages tools guided_json guided_choice response_format length_penalty
"""


@settings(max_examples=400, deadline=None)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS.split()), JSON, max_size=6),
    path=st.sampled_from([COMPLETIONS, CHAT]),
    limit=st.integers(0, 50),
)
def test_no_body_breaks_the_plan(fields: Any, path: str, limit: int) -> None:
    made = plan(fields, path, max_model_len=limit)

    assert made.prefill_body is None or json.loads(made.prefill_body)["max_tokens"] == 1
    assert (made.prefill_body is None) is bool(made.reason)


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=200), content_type=st.text(max_size=20))
def test_no_bytes_break_the_plan(body: bytes, content_type: str) -> None:
    plan(body, content_type=content_type)
