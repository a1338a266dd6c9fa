"""From a path to a `MooncakeConfig`. The vLLM plugin calls `load_config` at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mooncake_v0.config.addresses import parse_endpoint, parse_metadata
from mooncake_v0.config.model import Endpoint, MooncakeConfig, final_endpoints
from mooncake_v0.errors import ERROR, ConfigError, CouldNotCheckError, Diagnostic


def load_config(path: str | Path) -> MooncakeConfig:
    """The checked configuration in the file.

    Raises CouldNotCheckError if the file cannot be read, ConfigError (with its diagnostics) if it is not valid.
    """
    try:
        raw = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise CouldNotCheckError(f"{path}: {error.strerror}", fix="name a readable mooncake.json") from error
    except ValueError as error:
        raise _invalid(path, "$", str(error)) from error
    if not isinstance(raw, dict):
        raise _invalid(path, "$", "not a JSON object")
    prefill, decode = final_endpoints(_endpoint(path, raw, "prefill_url"), _endpoint(path, raw, "decode_url"))
    server, backend = _text(path, raw, "metadata_server"), raw.get("metadata_backend")
    metadata = parse_metadata(server, backend if isinstance(backend, str) else None)
    if metadata is None:
        raise _invalid(path, "$.metadata_server", f"not a metadata address: {server!r}")
    protocol = str(raw.get("protocol", "tcp")).lower()
    devices = tuple(part.strip() for part in str(raw.get("device_name", "")).split(",") if part.strip())
    if protocol == "rdma":
        if not devices:
            raise _invalid(path, "$.device_name", "protocol rdma needs a device_name")
        return MooncakeConfig(prefill, decode, metadata.url, "rdma", devices)
    if protocol != "tcp":
        raise _invalid(path, "$.protocol", f"neither tcp nor rdma: {protocol!r}")
    return MooncakeConfig(prefill, decode, metadata.url, "tcp")


def _endpoint(path: str | Path, raw: dict[str, Any], field: str) -> Endpoint:
    text = _text(path, raw, field)
    endpoint = parse_endpoint(text)
    if endpoint is None:
        raise _invalid(path, f"$.{field}", f"not HOST:PORT: {text!r}")
    return endpoint


def _text(path: str | Path, raw: dict[str, Any], field: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str):
        raise _invalid(path, f"$.{field}", f"a string is required, got {value!r}")
    return value


def _invalid(path: str | Path, where: str, what: str) -> ConfigError:
    fix = f"run `mooncake-v0 validate {path}`"
    return ConfigError(f"{path}: {where}: {what}", fix=fix, diagnostics=[Diagnostic("invalid", ERROR, where, what, fix)])
