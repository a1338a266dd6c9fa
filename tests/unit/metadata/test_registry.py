from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata import registry
from mooncake_v0.metadata.memory_store import MemoryStore
from mooncake_v0.metadata.registry import find, list_instances, parse_record, refresh, register, unregister
from tests.servers import wait_until
from tests.unit.metadata.builders import record

NAME = "10.0.0.7:13003"


def test_a_registered_record_is_found_and_listed_as_written() -> None:
    store = MemoryStore()

    written = register(store, record(NAME, seen_ago_s=99, api_url="http://10.0.0.7:8100"))

    assert written.is_fresh()
    assert find(store, NAME) == written
    assert list_instances(store) == [written]


def test_a_record_that_is_not_refreshed_vanishes() -> None:
    store = MemoryStore()

    register(store, record(NAME), ttl_s=0.1)

    wait_until(lambda: list_instances(store) == [], "the expiry", 5)


def test_a_refresh_is_refused_when_a_living_rival_has_taken_the_name() -> None:
    store = MemoryStore()
    mine = register(store, record(NAME, epoch="a1"))
    register(store, record(NAME, epoch="b2"))

    with pytest.raises(MetadataError, match="epoch b2"):
        refresh(store, mine)


def test_unregister_spares_a_successor() -> None:
    store = MemoryStore()
    mine = register(store, record(NAME, epoch="a1"))
    successor = register(store, replace(mine, epoch="b2"))

    assert unregister(store, mine) is False
    assert unregister(store, successor) is True
    assert list_instances(store) == []


def test_fields_of_a_later_version_are_ignored() -> None:
    value = json.loads(record(NAME).to_json())

    assert parse_record(json.dumps({**value, "new": 1, "version": 2}).encode()) is not None


@pytest.mark.parametrize(
    "broken",
    [
        {"rank": "0"},
        {"pid": True},
        {"rank": 1.0},
        {"refreshed_at": "x"},
        {"refreshed_at": None},
        {"refreshed_at": float("nan")},
        {"started_at": float("inf")},
        {"started_at": 10**400},
        {"host": 1},
        {"deployment": 1},
        {"api_url": 1},
    ],
)
def test_a_record_with_a_wrong_type_is_no_record(broken: dict[str, object]) -> None:
    value = json.loads(record(NAME).to_json())

    assert parse_record(json.dumps({**value, **broken}).encode()) is None


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.booleans() | st.integers() | st.floats() | st.text()
            for name in (*registry.RECORD_FIELDS, "new")
        },
    )
)
def test_a_record_read_fast_is_as_one_read_slowly(changed: dict[str, object]) -> None:
    value = json.dumps({**json.loads(record(NAME).to_json()), **changed}).encode()

    assert parse_record(value) == registry._parse_slowly(value)


@given(st.binary())
def test_no_bytes_raise(value: bytes) -> None:
    assert parse_record(value) is None
