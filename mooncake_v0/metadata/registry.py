"""Who runs where: the record that each agent keeps beside the engine's own keys.

An agent registers at start, refreshes every REFRESH_S, and unregisters on every orderly exit. `metadata ls`, `check`
and `prune`, and the proxy's `--discover`, read the records. A record lives under
`mooncake-v0/instances/<segment name>` and is one JSON object: the fields of `InstanceRecord`. Where the store has
expiry, a record that is not refreshed vanishes after its ttl; elsewhere `is_fresh` says the same from `refreshed_at`.

The engine's keys have no owner, no lease and no expiry (transfer engine 0.3.3.post2, transfer_metadata.cpp), which is
why the record exists.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Optional

import msgspec

from mooncake_v0.errors import MetadataError
from mooncake_v0.fast_json import loads
from mooncake_v0.metadata.store import MetadataStore

INSTANCE_PREFIX = "mooncake-v0/instances/"
REFRESH_S = 10.0
RECORD_TTL_S = 60.0
FRESH_S = 35.0  # three refreshes missed
RECORD_VERSION = 1


@dataclass(frozen=True)
class InstanceRecord:
    """One rank of one side, as its agent sees itself.

    segment:           the engine's name, host:handshake_port; also the last part of the key
    role:              "prefill" or "decode"
    rank:              0..15
    host:              the address that peers connect to
    handshake_port, data_port, side_channel_port:  TCP ports on host; the engine's data port is handshake + 1
    protocol:          "tcp" or "rdma"
    pid, hostname:     of the agent process
    epoch:             hex; changes with every start of the agent
    started_at, refreshed_at:  seconds since 1970, by the agent's clock
    deployment:        digest of the mooncake.json in force; two values on one store are two deployments
    api_url:           base URL of the vLLM server that this rank belongs to, where known
    """

    segment: str
    role: str
    rank: int
    host: str
    handshake_port: int
    data_port: int
    side_channel_port: int
    protocol: str
    pid: int
    hostname: str
    epoch: str
    started_at: float
    refreshed_at: float
    deployment: str = ""
    api_url: Optional[str] = None  # msgspec reads this class, also on Python 3.9
    version: int = RECORD_VERSION

    @property
    def key(self) -> str:
        return INSTANCE_PREFIX + self.segment

    def is_fresh(self, now: float | None = None) -> bool:
        """Whether the agent has refreshed lately; a clock that runs ahead counts as fresh."""
        return (time.time() if now is None else now) - self.refreshed_at <= FRESH_S

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


RECORD_FIELDS = frozenset(field.name for field in fields(InstanceRecord))
_decode_record = msgspec.json.Decoder(InstanceRecord).decode


def register(store: MetadataStore, record: InstanceRecord, ttl_s: float = RECORD_TTL_S) -> InstanceRecord:
    """Write the record, stamped with the time; returns it as written. Overwrites: claim first (see `find`)."""
    stamped = replace(record, refreshed_at=time.time())
    store.put(stamped.key, stamped.to_json(), ttl_s=ttl_s)
    return stamped


def refresh(store: MetadataStore, record: InstanceRecord, ttl_s: float = RECORD_TTL_S) -> InstanceRecord:
    """Write the record again with a new time. Raises MetadataError when another epoch has taken the name since."""
    found = find(store, record.segment)
    if found is not None and found.epoch != record.epoch and found.is_fresh():
        raise MetadataError(
            f"segment {record.segment!r} now belongs to pid {found.pid} on {found.hostname!r} (epoch {found.epoch})",
            fix="two processes have the same prefill_url or decode_url and rank: end one, or change its URL",
        )
    return register(store, record, ttl_s)


def unregister(store: MetadataStore, record: InstanceRecord) -> bool:
    """Remove the record, unless another epoch has overwritten it; True when it was removed."""
    value = store.get(record.key)
    if value is None or _epoch(value) != record.epoch:
        return False
    return store.delete(record.key, expected=value)


def find(store: MetadataStore, segment: str) -> InstanceRecord | None:
    """The record of a segment; None when there is none, or none that can be read."""
    value = store.get(INSTANCE_PREFIX + segment)
    return None if value is None else parse_record(value)


def list_instances(store: MetadataStore) -> list[InstanceRecord]:
    """All records that can be read, sorted by key."""
    records = (parse_record(entry.value) for entry in store.list(INSTANCE_PREFIX))
    return [record for record in records if record is not None]


def parse_record(value: bytes) -> InstanceRecord | None:
    """A record from its JSON; None for anything else. Fields of a later version are ignored."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        return _decode_record(value)
    return _parse_slowly(value)


def _parse_slowly(value: bytes) -> InstanceRecord | None:
    """For what msgspec is stricter about than these records need."""
    try:
        row = loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    try:
        record = InstanceRecord(**{name: field for name, field in row.items() if name in RECORD_FIELDS})
    except TypeError:
        return None
    return record if _is_sound(record) else None


def _is_sound(record: InstanceRecord) -> bool:
    texts = (
        record.segment,
        record.role,
        record.host,
        record.protocol,
        record.hostname,
        record.epoch,
        record.deployment,
    )
    numbers = (record.rank, record.handshake_port, record.data_port, record.side_channel_port, record.pid)
    times: tuple[Any, ...] = (record.started_at, record.refreshed_at)
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
        and all(isinstance(at, (int, float)) and abs(at) <= sys.float_info.max for at in times)
        and (record.api_url is None or isinstance(record.api_url, str))
    )


def _epoch(value: bytes) -> str | None:
    record = parse_record(value)
    return None if record is None else record.epoch
