"""What the keys of the engine and of our registry say about each segment: pure functions from entries to data.

The engine's two keys per segment (transfer engine 0.3.3.post2, transfer_metadata.cpp): `mooncake/ram/<name>` describes
protocol, devices and buffers, `mooncake/rpc_meta/<name>` the address that peers connect to. A name with a slash loses
the `ram/` (same file, getFullMetadataKey). Called by `metadata ls`, `check` and `prune`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Sequence

from mooncake_v0.digits import port_number
from mooncake_v0.metadata.engine_values import RAM_PREFIX, RPC_PREFIX, read_value
from mooncake_v0.metadata.registry import INSTANCE_PREFIX, InstanceRecord, parse_record
from mooncake_v0.metadata.store import Entry

ENGINE_PREFIX = "mooncake/"
OWN_PREFIX = "mooncake-v0/"
OUR_PREFIXES = (ENGINE_PREFIX, OWN_PREFIX)


@dataclass(frozen=True)
class Segment:
    """One engine name with everything published under it.

    ram, rpc_meta:  the parsed values; None when the key is missing or its value is not a JSON object
    entries:        the keys as read, for a delete that compares
    corrupt_keys:   keys whose value cannot be understood
    """

    name: str
    ram: dict[str, Any] | None
    rpc_meta: dict[str, Any] | None
    record: InstanceRecord | None
    entries: tuple[Entry, ...]
    corrupt_keys: tuple[str, ...] = ()

    @property
    def host(self) -> str | None:
        """The address that peers connect to: from rpc_meta, else from the record, else from the name."""
        if self.rpc_meta is not None and isinstance(self.rpc_meta.get("ip_or_host_name"), str):
            return str(self.rpc_meta["ip_or_host_name"])
        if self.record is not None:
            return self.record.host
        return self._from_name[0]

    @property
    def handshake_port(self) -> int | None:
        port = None if self.rpc_meta is None else self.rpc_meta.get("rpc_port")
        if isinstance(port, int) and _is_port(port):
            return port
        return self._from_name[1] if self.record is None else self.record.handshake_port

    @property
    def protocol(self) -> str | None:
        value = None if self.ram is None else self.ram.get("protocol")
        if isinstance(value, str):
            return value
        return None if self.record is None else self.record.protocol

    @property
    def probe_port(self) -> int | None:
        """The TCP port on which a living engine listens.

        tcp: the data port, handshake + 1 (tcp_transport.cpp); versions from 0.3.5 on publish `tcp_data_port` instead.
        rdma: the handshake port itself (rdma_transport.cpp, startHandshakeDaemon).
        """
        if self.handshake_port is None:
            return None
        if self.protocol == "rdma":
            return self.handshake_port
        published = None if self.ram is None else self.ram.get("tcp_data_port")
        is_published = isinstance(published, int) and _is_port(published)
        return int(published or 0) if is_published else self.handshake_port + 1

    @property
    def buffers(self) -> list[dict[str, Any]]:
        return _dicts(self.ram, "buffers")

    @property
    def devices(self) -> list[dict[str, Any]]:
        return _dicts(self.ram, "devices")

    @property
    def published_at(self) -> str | None:
        """The engine's own time stamp: local time of its host, without a zone."""
        value = None if self.ram is None else self.ram.get("timestamp")
        return value if isinstance(value, str) else None

    @property
    def _from_name(self) -> tuple[str | None, int | None]:
        host, separator, text = self.name.rpartition(":")
        port = port_number(text)
        return (host, port) if separator and port is not None else (None, None)


def group_segments(entries: Iterable[Entry]) -> list[Segment]:
    """The segments in a list of entries, sorted by name; keys that are neither the engine's nor ours are left out."""
    by_name: dict[str, list[Entry]] = {}
    for entry in entries:
        name = segment_name(entry.key)
        if name is not None:
            by_name.setdefault(name, []).append(entry)
    return [_segment(name, by_name[name]) for name in sorted(by_name)]


def segment_name(key: str) -> str | None:
    """The engine's name that a key belongs to; None for every other key."""
    for prefix in (RAM_PREFIX, RPC_PREFIX, INSTANCE_PREFIX):
        if key.startswith(prefix):
            return key[len(prefix) :] or None
    # a name with a slash: mooncake/<name>
    if key.startswith(ENGINE_PREFIX) and "/" in key[len(ENGINE_PREFIX) :]:
        return key[len(ENGINE_PREFIX) :]
    return None


def _segment(name: str, entries: Sequence[Entry]) -> Segment:
    record = None
    values: dict[str, dict[str, Any] | None] = {RAM_PREFIX: None, RPC_PREFIX: None}
    corrupt = []
    for entry in entries:
        if entry.key.startswith(INSTANCE_PREFIX):
            record = parse_record(entry.value)
            is_sound = record is not None
        else:
            prefix = RPC_PREFIX if entry.key.startswith(RPC_PREFIX) else RAM_PREFIX
            values[prefix], fault = read_value(entry.key, entry.value)
            is_sound = fault is None
        if not is_sound:
            corrupt.append(entry.key)
    return Segment(name, values[RAM_PREFIX], values[RPC_PREFIX], record, tuple(entries), tuple(corrupt))


def _dicts(of: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    found = None if of is None else of.get(name)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535
