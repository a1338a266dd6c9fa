from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan, content_key, decode_plan, encode_plan

TOKENS = array("l", [1, 2, 3, 4])


@pytest.mark.parametrize(
    "other",
    [
        content_key(b"other model", b"", TOKENS),
        content_key(b"model", b"adapter", TOKENS),
        content_key(b"model", b"", array("l", [1, 2, 3])),
        content_key(b"model", b"", array("l", [0, 2, 3, 4])),
        content_key(b"model", b"", array("l", [2, 1, 3, 4])),
    ],
    ids=["model", "adapter", "prefix", "first token", "order"],
)
def test_key_differs_with_anything_that_the_kv_depends_on(other: bytes) -> None:
    assert other != content_key(b"model", b"", TOKENS)
    assert len(other) == 16


def test_key_is_the_same_for_the_same_content() -> None:
    assert content_key(b"model", b"a", TOKENS) == content_key(b"model", b"a", array("l", TOKENS))


def test_adapter_bytes_are_not_confused_with_tokens() -> None:
    assert content_key(b"m", TOKENS.tobytes(), array("l")) != content_key(b"m", b"", TOKENS)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=5), st.integers(0, 2**31), st.booleans())
def test_plan_survives_the_broadcast(keys: list[bytes], rows: int, complete: bool) -> None:
    prompts = [PromptPlan(key, array("i", [5, 6]).tobytes(), 1, 9, 20) for key in keys]
    plan = TransferPlan(prompts, rows, complete)

    assert decode_plan(encode_plan(plan)) == plan
