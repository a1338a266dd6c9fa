"""Whether the pinned engine can read a value: the types of the fields it looks at.

A value that is JSON but of other types ends in an exception out of `transfer_sync_read` or `initialize` instead of an
error code (0.3.3.post2, ran: "requires objectValue", "Type is not convertible to string"), so the gateway does not hand
such a value to an engine, and `metadata check` names it. Fields that are absent or unknown are left to the engine.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

import msgspec

from mooncake_v0.fast_json import loads

RAM_PREFIX = "mooncake/ram/"
RPC_PREFIX = "mooncake/rpc_meta/"

# transfer_metadata.cpp, encodeSegmentDesc and decodeSegmentDesc
RAM_FIELDS: dict[str, type] = {"name": str, "protocol": str, "timestamp": str, "buffers": list, "devices": list}
BUFFER_FIELDS: dict[str, type] = {"name": str, "addr": int, "length": int, "lkey": list, "rkey": list}
DEVICE_FIELDS: dict[str, type] = {"name": str, "lid": int, "gid": str}
RPC_FIELDS: dict[str, type] = {"ip_or_host_name": str, "rpc_port": int}


def _shape(name: str, fields: Mapping[str, Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, [(field, Optional[wanted], None) for field, wanted in fields.items()], gc=False)


_RAM_SHAPE = {
    **RAM_FIELDS,
    "buffers": list[_shape("Buffer", BUFFER_FIELDS)],  # type: ignore[misc]
    "devices": list[_shape("Device", DEVICE_FIELDS)],  # type: ignore[misc]
}
# a value that one of these takes is sound; of any other the functions below say what is wrong
_SOUND = {
    RAM_PREFIX: msgspec.json.Decoder(_shape("Ram", _RAM_SHAPE)),
    RPC_PREFIX: msgspec.json.Decoder(_shape("RpcMeta", RPC_FIELDS)),
}


def fault_in(key: str, value: bytes) -> str | None:
    """What is wrong with the value of an engine key, in words; None when nothing is, or the key is not the engine's."""
    return read_value(key, value)[1] if key.startswith((RAM_PREFIX, RPC_PREFIX)) else None


def read_value(key: str, value: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """A value as the JSON object that it should be, or None, and what is wrong with it as in `fault_in`."""
    try:
        found = loads(value)
    except ValueError:
        return None, "it is not JSON"
    except RecursionError:
        return None, "it is nested too deeply"
    if not isinstance(found, dict):
        return None, "it is not a JSON object"
    prefix = next((prefix for prefix in _SOUND if key.startswith(prefix)), None)
    if prefix is None or _is_sound(prefix, value):
        return found, None
    return found, _wrong_field(found, RPC_FIELDS) if prefix == RPC_PREFIX else _wrong_segment(found)


def _is_sound(prefix: str, value: bytes) -> bool:
    try:
        _SOUND[prefix].decode(value)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


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
