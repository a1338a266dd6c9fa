from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_v0.metadata.segments import group_segments, segment_name
from mooncake_v0.metadata.store import Entry
from tests.unit.metadata.builders import entry_of, ram, record, rpc_meta, segment

NAME = "10.0.0.7:13003"


def test_the_keys_of_one_name_become_one_segment() -> None:
    found = segment(ram(NAME), rpc_meta(NAME), entry_of(record(NAME)))

    assert (found.name, found.host, found.handshake_port, found.protocol) == (NAME, "10.0.0.7", 13003, "tcp")
    assert found.record is not None and found.record.role == "prefill"
    assert (found.corrupt_keys, len(found.entries)) == ((), 3)


@pytest.mark.parametrize(
    ("fields", "port"),
    [({}, 13004), ({"protocol": "rdma"}, 13003), ({"tcp_data_port": 15555}, 15555), ({"tcp_data_port": "x"}, 13004)],
)
def test_the_port_to_knock_on_depends_on_the_protocol(fields: dict[str, object], port: int) -> None:
    assert segment(ram(NAME, **fields), rpc_meta(NAME)).probe_port == port


def test_without_rpc_meta_the_address_comes_from_the_record_or_the_name() -> None:
    assert segment(ram("h:13003")).host == "h"
    assert segment(ram("decode"), entry_of(record("10.0.0.8:1", segment="decode"))).host == "10.0.0.8"
    assert segment(ram("decode")).host is None


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("mooncake/ram/a:1", "a:1"),
        ("mooncake/rpc_meta/a:1", "a:1"),
        ("mooncake-v0/instances/a:1", "a:1"),
        ("mooncake/we ird/x", "we ird/x"),
        ("mooncake/ram/", None),
        ("mooncake/x", None),
        ("mooncake-v0/probe/1", None),
        ("other/ram/a", None),
    ],
)
def test_only_the_engines_and_our_own_keys_name_a_segment(key: str, name: str | None) -> None:
    assert segment_name(key) == name


@pytest.mark.parametrize("value", [b"", b"garbage", b"[]", b"1", b"\xff\xfe", b'{"a":'])
def test_a_value_that_cannot_be_read_is_marked_and_not_fatal(value: bytes) -> None:
    key = f"mooncake/ram/{NAME}"

    assert segment(Entry(key, value), rpc_meta(NAME)).corrupt_keys == (key,)


@given(st.sampled_from(["ram", "rpc_meta"]), st.text(min_size=1), st.binary())
@example("ram", ":²", b"")
@example("ram", "host:" + "1" * 5000, b"")
def test_no_bytes_under_a_key_raise(kind: str, name: str, value: bytes) -> None:
    for found in group_segments(
        [Entry(f"mooncake/{kind}/{name}", value), Entry(f"mooncake-v0/instances/{name}", value)]
    ):
        assert (found.host, found.probe_port, found.buffers, found.devices, found.published_at) is not None


@given(
    st.dictionaries(
        st.sampled_from(["ip_or_host_name", "rpc_port", "protocol", "buffers", "devices", "tcp_data_port"]),
        st.recursive(
            st.none() | st.integers() | st.text(),
            lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3),
            max_leaves=4,
        ),
    )
)
def test_no_json_under_a_key_raises(value: dict[str, object]) -> None:
    data = json.dumps(value).encode()
    found = segment(Entry(f"mooncake/ram/{NAME}", data), Entry(f"mooncake/rpc_meta/{NAME}", data))
    assert (found.host, found.probe_port, found.buffers, found.devices, found.published_at) is not None
