"""Rules about which fields there are and of which type. The JSON Schema finds these; here they get their words."""

from __future__ import annotations

import difflib
import json
from typing import Any, Iterator

from mooncake_v0.config.rules.registry import Finding, Subject, rule
from mooncake_v0.config.source import quote, shorten
from mooncake_v0.errors import ERROR, WARNING

KNOWN_FIELDS = ("prefill_url", "decode_url", "metadata_server", "metadata_backend", "protocol", "device_name")
EXAMPLES = {
    "prefill_url": "192.168.0.137:13003",
    "decode_url": "192.168.0.139:13003",
    "metadata_server": "etcd://192.168.0.139:2379",
}
STORE_FIELDS = ("local_hostname", "master_server_address", "global_segment_size", "local_buffer_size")
KV_TRANSFER_FIELDS = ("kv_connector", "kv_role", "kv_rank", "kv_parallel_size", "kv_buffer_size", "kv_ip", "kv_port")
JSON_TYPES = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}


def json_type(value: Any) -> str:
    return JSON_TYPES.get(type(value), "a number")


def nearest(word: str, known: tuple[str, ...]) -> str | None:
    """The known name that a misspelt or differently cased one most likely means."""
    plain = word.strip().lower().replace("-", "_").replace(" ", "_")
    found = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    return found[0] if found else None


@rule(ERROR, last=True)
def not_an_object(subject: Subject) -> Iterator[Finding]:
    """The file is JSON, but not an object: a list, a text or a number.

    A mooncake.json describes one pair of instances; a list of pairs is not a thing V0 knows.
    """
    if subject.document.complete and not isinstance(subject.document.value, dict):
        what = f"the file holds {json_type(subject.document.value)}, not an object"
        yield Finding((), what, 'write one object: { "prefill_url": ..., "decode_url": ..., ... }')


@rule(ERROR, last=True)
def store_config(subject: Subject) -> Iterator[Finding]:
    """This is a config file of the Mooncake Store (MooncakeStoreConnector, LMCache, the V1 store), not of the V0 pair.

    The Store's file has local_hostname, master_server_address and segment sizes. The V0 connector given that file
    fails with "'NoneType' has no attribute 'split'", because prefill_url and decode_url are missing in it.
    """
    found = [name for name in STORE_FIELDS if name in subject.fields]
    if found:
        what = f"{found[0]} belongs to the Mooncake Store's file; the V0 pair needs prefill_url and decode_url"
        yield Finding(
            (found[0],),
            what,
            "point MOONCAKE_CONFIG_PATH at the pair's mooncake.json, or write one (`mooncake-v0 schema`)",
        )


@rule(ERROR, last=True)
def kv_transfer_config_file(subject: Subject) -> Iterator[Finding]:
    """The content of --kv-transfer-config was saved as the mooncake.json (or mixed into it).

    kv_connector, kv_role, kv_rank, kv_parallel_size and kv_buffer_size are given to vLLM on the command line, one set
    for each instance. mooncake.json holds the addresses, one file for both.
    """
    found = [name for name in KV_TRANSFER_FIELDS if name in subject.fields]
    if found:
        what = f"{found[0]} is a field of --kv-transfer-config, not of mooncake.json"
        yield Finding((found[0],), what, "move it to the --kv-transfer-config option of vLLM's command line")


@rule(ERROR)
def missing_field(subject: Subject) -> Iterator[Finding]:
    """A field that has no default is not there: prefill_url, decode_url or metadata_server.

    protocol defaults to tcp, device_name to nothing, and the kind of metadata server to etcd (upstream's defaults).
    """
    meant = {nearest(name, KNOWN_FIELDS) for name in subject.fields if name not in KNOWN_FIELDS}
    for error in subject.shape_errors:
        if error.keyword == "required" and error.name not in meant:
            name = error.name
            yield Finding(
                (name,), f"the field {name} is missing", f"add {quote(name)}: {quote(EXAMPLES[name])} with your address"
            )


@rule(WARNING)
def unknown_field(subject: Subject) -> Iterator[Finding]:
    """A field that the V0 connector does not know. It is ignored, which is an error if a known field was meant.

    Known: prefill_url, decode_url, metadata_server, metadata_backend, protocol, device_name; and $schema for editors.
    """
    for error in subject.shape_errors:
        if error.keyword != "additionalProperties":
            continue
        name = str(error.path[-1])
        meant = nearest(name, KNOWN_FIELDS)
        offset = subject.document.spans[error.path].key
        if meant and meant not in subject.fields:
            what, fix = f"unknown field {shorten(name)!r}, and {meant} is missing", f"rename it to {quote(meant)}"
            yield Finding(error.path, what, fix, related=((meant,),), offset=offset, severity=ERROR)
        else:
            what, fix = (
                f"unknown field {shorten(name)!r} is ignored",
                f"remove it, known fields are {', '.join(KNOWN_FIELDS)}",
            )
            yield Finding(error.path, what, fix, offset=offset)


@rule(ERROR, syntax=True)
def wrong_type(subject: Subject) -> Iterator[Finding]:
    """A field has another type than text. Every field of a mooncake.json is a text in double quotes.

    Ports belong into the text with their host; several RDMA devices are one text with commas.
    """
    for error in subject.shape_errors:
        if error.keyword == "type" and error.path and error.path[0] in subject.fields:
            name, value = str(error.path[0]), subject.fields[str(error.path[0])]
            written = json.dumps(value, ensure_ascii=True)
            what = written if value is None or isinstance(value, bool) else f"{json_type(value)}: {shorten(written)}"
            yield Finding(error.path, f"{name} is {what}", _as_text(name, value))


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return f"write one text, for example {quote(shorten(','.join(value)))}"
    if value is None:
        return (
            f"remove the line, or write {name} as a text"
            if name in ("protocol", "device_name")
            else f"write {name} as a text"
        )
    if name in EXAMPLES:
        return f"write it as a text, for example {quote(EXAMPLES[name])}"
    return "write it as a text in double quotes"
