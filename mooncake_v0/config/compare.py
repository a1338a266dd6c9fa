"""Several mooncake.json files against each other: prefill's and decode's copies must say the same."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mooncake_v0.config.addresses import masked, parse_endpoint, parse_metadata
from mooncake_v0.config.check import Checked
from mooncake_v0.config.rules.registry import explain_only
from mooncake_v0.config.source import render_path
from mooncake_v0.errors import ERROR, Diagnostic

explain_only(
    "files-differ",
    ERROR,
    """Two copies of the file differ in a field. Prefill and decode must read the same configuration.

    Blanks, capitals and metadata_backend are no difference as long as the meaning is the same. The two sides compare
    a hash of the meaning when they meet, and transfer nothing if it differs. `--no-compare` checks unrelated files.
    """,
)


def compare(files: Sequence[tuple[str, Checked]]) -> dict[str, tuple[Diagnostic, ...]]:
    """Findings by path: every file against the first one that could be parsed."""
    readable = [(path, checked) for path, checked in files if isinstance(checked.document.value, dict)]
    return {path: _differences(readable[0], path, checked) for path, checked in readable[1:]}


def _differences(first: tuple[str, Checked], path: str, checked: Checked) -> tuple[Diagnostic, ...]:
    ours, theirs = meaning(checked.document.value), meaning(first[1].document.value)
    found = []
    for name, value in ours.items():
        if value != theirs[name]:
            line, column = checked.document.place((name,)) or (1, 1)
            what = f"{name} is {masked(repr(value))} here and {masked(repr(theirs[name]))} in {first[0]}"
            fix = "make both copies equal; prefill and decode read the same file"
            found.append(Diagnostic("files-differ", ERROR, render_path((name,)), what, fix, line, column))
    return tuple(found)


def meaning(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they take effect: blanks, capitals and defaults make no difference. A wrong value stays as it is."""
    server, backend = fields.get("metadata_server"), fields.get("metadata_backend")
    address = parse_metadata(server, backend if isinstance(backend, str) else None) if isinstance(server, str) else None
    devices = fields.get("device_name", "")
    protocol = fields.get("protocol", "tcp")
    return {
        "prefill_url": _endpoint(fields.get("prefill_url")),
        "decode_url": _endpoint(fields.get("decode_url")),
        "metadata_server": address.url if address else server,
        "protocol": protocol.strip().lower() if isinstance(protocol, str) else protocol,
        "device_name": ",".join(part.strip() for part in devices.split(",")) if isinstance(devices, str) else devices,
    }


def _endpoint(value: Any) -> Any:
    endpoint = parse_endpoint(value) if isinstance(value, str) else None
    return str(endpoint) if endpoint else value
