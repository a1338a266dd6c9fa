"""Reading JSON fast gives what reading it slowly gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_v0.fast_json import dumps_indented, loads, loads_to_rewrite
from mooncake_v0.metadata import engine_values
from mooncake_v0.metadata.engine_values import RAM_PREFIX, RPC_PREFIX, fault_in

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
FIELDS = sorted(
    {*engine_values.RAM_FIELDS, *engine_values.BUFFER_FIELDS, *engine_values.DEVICE_FIELDS, *engine_values.RPC_FIELDS}
)
NEARLY_RIGHT = st.dictionaries(
    st.sampled_from(FIELDS),
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(1.0)
    | st.text()
    | st.lists(st.dictionaries(st.sampled_from(FIELDS), st.integers() | st.booleans() | st.text() | st.just([1]))),
)


def outcome(read: Any, text: bytes) -> str:
    """What a reader gives, comparable also for NaN, or that it refuses."""
    try:
        return repr(read(text))
    except ValueError:
        return "no JSON"


@given(VALUES.map(json.dumps).map(str.encode))
@example(b"\xef\xbb\xbf{}")
@example('"\u00e9"'.encode("utf-16"))
@example(b'{"a": NaN, "b": 1e999, "c": 123456789012345678901234567890}')
@example(b'{"a": 1, "a": "x"}')
def test_a_text_gives_what_json_loads_gives(text: bytes) -> None:
    assert outcome(loads, text) == outcome(json.loads, text)


@given(st.binary() | st.text('{}[]"\\:,0123456789.eE-+ntrufals \x01').map(str.encode))
def test_what_json_loads_refuses_is_refused(text: bytes) -> None:
    assert outcome(loads, text) == outcome(json.loads, text)


@given(VALUES)
@example({"prompt": "\ud800", "temperature": float("nan")})
def test_what_is_written_again_is_read_as_what_it_was(value: object) -> None:
    read, dumps = loads_to_rewrite(json.dumps(value).encode())

    assert repr(json.loads(dumps([read]))) == repr([json.loads(json.dumps(value))])


def test_a_text_that_is_nested_too_deeply_is_no_crash() -> None:
    with pytest.raises(RecursionError):
        loads(b"[" * 100_000)


@given(VALUES)
def test_indented_text_is_as_json_writes_it(value: object) -> None:
    assert dumps_indented(value) == json.dumps(value, indent=2)


@given(NEARLY_RIGHT)
def test_a_value_that_is_sound_at_a_glance_has_no_fault_at_a_closer_look(value: dict[str, Any]) -> None:
    text = json.dumps(value).encode()

    assert fault_in(f"{RAM_PREFIX}x", text) == engine_values._wrong_segment(value)
    assert fault_in(f"{RPC_PREFIX}x", text) == engine_values._wrong_field(value, engine_values.RPC_FIELDS)
