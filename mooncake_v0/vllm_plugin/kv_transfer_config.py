"""The value of --kv-transfer-config, with V0's names and defaults (vllm 0.6.5, config.py, KVTransferConfig)."""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass, fields
from typing import Any, Mapping

from mooncake_v0.config.model import MooncakeConfig, Role
from mooncake_v0.errors import UnsupportedError

CONNECTOR = "MooncakeConnector"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_RANK_OF = {"kv_producer": 0, "kv_consumer": 1}
_EXAMPLE = (
    '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2,"kv_buffer_size":2e9}'
)


@dataclass(frozen=True)
class KVTransferConfig:
    """kv_buffer_size is in bytes, per rank and side. mooncake is the checked mooncake.json, once it has been read."""

    kv_connector: str | None = None
    kv_buffer_device: str = "cuda"
    kv_buffer_size: float = 1e9
    kv_role: str | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    mooncake: MooncakeConfig | None = None
    api_url: str | None = None

    @property
    def role(self) -> Role:
        return "prefill" if self.kv_role == "kv_producer" else "decode"

    @property
    def is_producer(self) -> bool:
        return self.kv_role == "kv_producer"


_USER_FIELDS = tuple(field.name for field in fields(KVTransferConfig) if field.name not in ("mooncake", "api_url"))


def parse_kv_transfer_config(value: str | Mapping[str, Any] | KVTransferConfig) -> KVTransferConfig:
    """Check the flag's JSON, or the dictionary given to `LLM`. Raises UnsupportedError with one clear reason."""
    if isinstance(value, KVTransferConfig):
        return value
    raw = _parse_json(value) if isinstance(value, str) else dict(value)
    for name in raw:
        if name not in _USER_FIELDS:
            near = difflib.get_close_matches(name, _USER_FIELDS, n=1)
            raise UnsupportedError(
                f"kv_transfer_config has no field {name!r}",
                fix=f"write {near[0]!r}" if near else f"known are {', '.join(_USER_FIELDS)}",
            )
    raw["kv_buffer_size"] = _parse_bytes(raw.get("kv_buffer_size", KVTransferConfig.kv_buffer_size))
    _check_types(raw)
    config = KVTransferConfig(**raw)
    _check_values(config)
    return config


def _parse_json(text: str) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise UnsupportedError(
            f"--kv-transfer-config is not JSON: {error}; got {text!r}", fix=f"quote it for the shell: '{_EXAMPLE}'"
        ) from None
    if not isinstance(raw, dict):
        raise UnsupportedError(f"--kv-transfer-config is not a JSON object: {text!r}", fix=f"write '{_EXAMPLE}'")
    return raw


def _parse_bytes(value: object) -> float:
    """2e9, 2000000000, "2e9" and "2GB" are all two billion bytes."""
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9.eE+]+)\s*([A-Za-z]*)\s*", value)
        if match and match[2].upper() in _UNITS:
            try:
                number = float(match[1]) * _UNITS[match[2].upper()]
            except ValueError:
                number = math.nan
    if not math.isfinite(number) or number < 1:
        raise UnsupportedError(
            f"kv_buffer_size is {value!r}", fix='give a number of bytes above 0, for example 2e9 or "2GB"'
        )
    return number


def _check_types(raw: Mapping[str, Any]) -> None:
    for name in ("kv_rank", "kv_parallel_size", "kv_port"):
        value = raw.get(name, 0)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UnsupportedError(f"{name} is {value!r}", fix="write a whole number without quotes")
    for name in ("kv_connector", "kv_role", "kv_buffer_device", "kv_ip"):
        value = raw.get(name, "")
        if value is not None and not isinstance(value, str):
            raise UnsupportedError(f"{name} is {value!r}", fix="write a string")


def _check_values(config: KVTransferConfig) -> None:
    if config.kv_connector != CONNECTOR:
        raise UnsupportedError(
            f"kv_connector is {config.kv_connector!r}", fix=f"this package brings {CONNECTOR!r} and no other connector"
        )
    if config.kv_role not in _RANK_OF:
        why = " (an instance cannot be both here: each has one peer)" if config.kv_role == "kv_both" else ""
        raise UnsupportedError(
            f"kv_role is {config.kv_role!r}{why}", fix="write kv_producer on prefill and kv_consumer on decode"
        )
    if config.kv_parallel_size != 2:
        raise UnsupportedError(
            f"kv_parallel_size is {config.kv_parallel_size}", fix="write 2: one prefill and one decode instance"
        )
    expected = _RANK_OF[config.kv_role]
    if config.kv_rank != expected:
        raise UnsupportedError(
            f"kv_rank is {config.kv_rank} with kv_role {config.kv_role!r}",
            fix=f'write "kv_rank":{expected}: the producer has rank 0, the consumer rank 1',
        )
    if config.kv_buffer_device not in ("cuda", "cpu"):
        raise UnsupportedError(f"kv_buffer_device is {config.kv_buffer_device!r}", fix='write "cuda" or "cpu"')
