"""Whether the pinned engine can read a value: the types of the fields it looks at.

A value that is JSON but of other types ends in an exception out of `transfer_sync_read` or `initialize` instead of an
error code (0.3.3.post2, ran: "requires objectValue", "Type is not convertible to string"), so the gateway does not hand
such a value to an engine, and `metadata check` names it. Fields that are absent or unknown are left to the engine.
"""

from __future__ import annotations

import json
from typing import Any, Mapping

RAM_PREFIX = "mooncake/ram/"
RPC_PREFIX = "mooncake/rpc_meta/"

# transfer_metadata.cpp, encodeSegmentDesc and decodeSegmentDesc
RAM_FIELDS: dict[str, type] = {"name": str, "protocol": str, "timestamp": str, "buffers": list, "devices": list}
BUFFER_FIELDS: dict[str, type] = {"name": str, "addr": int, "length": int, "lkey": list, "rkey": list}
DEVICE_FIELDS: dict[str, type] = {"name": str, "lid": int, "gid": str}
RPC_FIELDS: dict[str, type] = {"ip_or_host_name": str, "rpc_port": int}


def fault_in(key: str, value: bytes) -> str | None:
    """What is wrong with the value of an engine key, in words; None when nothing is, or the key is not the engine's."""
    return read_value(key, value)[1] if key.startswith((RAM_PREFIX, RPC_PREFIX)) else None


def read_value(key: str, value: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """A value as the JSON object that it should be, or None, and what is wrong with it as in `fault_in`."""
    try:
        found = json.loads(value)
    except ValueError:
        return None, "it is not JSON"
    except RecursionError:
        return None, "it is nested too deeply"
    if not isinstance(found, dict):
        return None, "it is not a JSON object"
    if key.startswith(RPC_PREFIX):
        return found, _wrong_field(found, RPC_FIELDS)
    return found, _wrong_segment(found) if key.startswith(RAM_PREFIX) else None


def _wrong_segment(found: Mapping[str, Any]) -> str | None:
    lists = (("buffers", BUFFER_FIELDS), ("devices", DEVICE_FIELDS))
    return _wrong_field(found, RAM_FIELDS) or next(
        (fault for name, fields in lists for fault in [_wrong_item(found.get(name) or [], name, fields)] if fault), None
    )


def _wrong_item(items: list[Any], name: str, fields: Mapping[str, type]) -> str | None:
    for number, item in enumerate(items):
        fault = _wrong_field(item, fields) if isinstance(item, dict) else "not an object"
        if fault:
            return f"{name}[{number}]: {fault}"
    return None


def _wrong_field(of: Mapping[str, Any], fields: Mapping[str, type]) -> str | None:
    for name, wanted in fields.items():
        value = of.get(name)
        if value is not None and (not isinstance(value, wanted) or (wanted is int and isinstance(value, bool))):
            return f"{name} is not of type {wanted.__name__}"
    return None
