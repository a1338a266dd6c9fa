"""Entries as the engine and an agent write them, for the unit tests."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from mooncake_v0.metadata.registry import InstanceRecord
from mooncake_v0.metadata.segments import Segment, group_segments
from mooncake_v0.metadata.store import Entry

BUFFER = {"addr": 4096, "length": 8192, "name": "x"}


def ram(name: str, **fields: object) -> Entry:
    value = {"name": name, "protocol": "tcp", "buffers": [BUFFER], "timestamp": "2026-01-01 00:00:00.0", **fields}
    return Entry(f"mooncake/ram/{name}", json.dumps(value).encode())


def rpc_meta(name: str, host: str | None = None, port: int | None = None) -> Entry:
    own_host, _, own_port = name.rpartition(":")
    value = {"ip_or_host_name": host or own_host, "rpc_port": port or int(own_port)}
    return Entry(f"mooncake/rpc_meta/{name}", json.dumps(value).encode())


def record(name: str, *, seen_ago_s: float = 0.0, **fields: object) -> InstanceRecord:
    host, _, port = name.rpartition(":")
    now = time.time()
    made = InstanceRecord(
        segment=name,
        role="prefill",
        rank=0,
        host=host,
        handshake_port=int(port),
        data_port=int(port) + 1,
        side_channel_port=int(port) + 32,
        protocol="tcp",
        pid=1,
        hostname="node-7",
        epoch="a1",
        started_at=now - 1000,
        refreshed_at=now - seen_ago_s,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def entry_of(made: InstanceRecord) -> Entry:
    return Entry(made.key, made.to_json())


def segment(*entries: Entry) -> Segment:
    (found,) = group_segments(entries)
    return found
