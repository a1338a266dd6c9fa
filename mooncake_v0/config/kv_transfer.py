"""Rules about the text of --kv-transfer-config, with V0's names (KVTransferConfig of vLLM 0.6.5, vllm/config.py).

The text is JSON, checked with the same parser as a mooncake.json; a finding's `where` is
--kv-transfer-config.kv_rank. Called by `mooncake-v0 validate`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping

from mooncake_v0.config.json_parser import parse
from mooncake_v0.config.model import Role
from mooncake_v0.config.rules.registry import Checks, Finding, Rule
from mooncake_v0.config.source import Document, Problem, quote, shorten
from mooncake_v0.errors import ERROR, INFO, WARNING

FIELD_TYPES: Mapping[str, tuple[type, ...]] = {
    "kv_connector": (str,),
    "kv_role": (str,),
    "kv_rank": (int,),
    "kv_parallel_size": (int,),
    "kv_buffer_size": (int, float, str),
    "kv_buffer_device": (str,),
    "kv_ip": (str,),
    "kv_port": (int,),
}
# null is the same as leaving these out
OPTIONAL_FIELDS = ("kv_ip", "kv_port")
ROLE_NAMES: Mapping[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}
RANKS = {"kv_producer": 0, "kv_consumer": 1}
UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
# the forms of kv_buffer_size that the plugin takes (mooncake_v0/vllm_plugin/kv_transfer_config.py)
BUFFER_SIZE = re.compile(r"\s*[0-9.eE+]+\s*([KMG]I?B)?\s*", re.ASCII | re.IGNORECASE)
SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]+)?)\s*([kmgtKMGT]?[iI]?)[bB]?\s*", re.ASCII)
DEFAULT_BUFFER_BYTES = 10**9  # KVTransferConfig.kv_buffer_size = 1e9
EXAMPLE = (
    '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2,"kv_buffer_size":2e9}'
)


def parse_size_bytes(value: Any) -> int | None:
    """Bytes of a size as people write it: 2000000000, 2e9, "2e9", "2GB" (10**9) or "2GiB" (2**30). None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return int(value) if math.isfinite(value) else None
    match = SIZE.fullmatch(value) if isinstance(value, str) and len(value) < 40 else None
    if match is None:
        return None
    unit = match[2].lower()
    number = float(match[1])
    factor = UNITS.get(unit) or BINARY_UNITS.get(unit)
    return int(number * factor) if factor and math.isfinite(number) else None


@dataclass(frozen=True)
class KvSubject:
    """One --kv-transfer-config as the rules see it, with what the caller knows of its instance.

    prompt_bytes: what one prompt of max_prompt_tokens needs on one rank, where the model is known.
    """

    document: Document
    role: Role | None = None
    api_port: int | None = None
    prompt_bytes: int | None = None
    max_prompt_tokens: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """The value, None if absent or of a wrong type."""
        value = self.fields.get(name)
        return None if isinstance(value, bool) or not isinstance(value, FIELD_TYPES[name]) else value

    def number(self, name: str) -> int | None:
        """The value if it is a whole number."""
        value = self.get(name)
        return value if isinstance(value, int) else None


KV_RULES: Checks[KvSubject] = Checks()


def check_kv_transfer_config(
    text: str,
    *,
    role: Role | None = None,
    api_port: int | None = None,
    prompt_bytes: int | None = None,
    max_prompt_tokens: int = 0,
) -> tuple[KvSubject, list[tuple[Rule, Finding]]]:
    """The parsed option and its findings. Never raises."""
    document = parse(text)
    fields = document.value if isinstance(document.value, dict) else {}
    subject = KvSubject(document, role, api_port, prompt_bytes, max_prompt_tokens, fields)
    return subject, list(KV_RULES.run(subject))


@KV_RULES.rule(ERROR)
def kv_json(subject: KvSubject) -> Iterator[Finding]:
    """--kv-transfer-config is not one JSON object.

    In a shell it must stand in single quotes, or the shell takes the double quotes away:
    --kv-transfer-config '{"kv_connector":"MooncakeConnector", ...}'
    """
    problem: Problem | None = next(iter(subject.document.problems), None)
    if problem is not None:
        unquoted = problem.rule in ("json-quotes", "file-not-json")
        fix = f"put it in single quotes in the shell: '{EXAMPLE}'" if unquoted else problem.fix
        yield Finding(problem.path, f"{problem.what} (column {problem.offset + 1})", fix)
    elif not isinstance(subject.document.value, dict):
        yield Finding((), "not a JSON object", f"write {EXAMPLE}")


@KV_RULES.rule(ERROR)
def kv_unknown_field(subject: KvSubject) -> Iterator[Finding]:
    """A field that V0's --kv-transfer-config does not have, misspelt or from V1 (num_workers, ...)."""
    for name in subject.fields:
        if name not in FIELD_TYPES:
            near = difflib.get_close_matches(name.lower().replace("-", "_"), list(FIELD_TYPES), n=1, cutoff=0.75)
            meant = near and near[0] not in subject.fields
            fix = f"rename it to {quote(near[0])}" if meant else f"remove it; the fields are {', '.join(FIELD_TYPES)}"
            yield Finding((name,), f"unknown field {shorten(name)!r}", fix)


@KV_RULES.rule(ERROR)
def kv_wrong_type(subject: KvSubject) -> Iterator[Finding]:
    """A field of --kv-transfer-config has a type that cannot be meant: a list, an object, true, null."""
    for name, value in subject.fields.items():
        if value is None and name in OPTIONAL_FIELDS or name not in FIELD_TYPES or name == "kv_buffer_size":
            continue
        if subject.get(name) is None:
            wanted = "a text" if FIELD_TYPES[name] == (str,) else "a number"
            yield Finding(
                (name,), f"{name} is {shorten(json.dumps(value))}, not {wanted}", f"write {wanted}, as in {EXAMPLE}"
            )


@KV_RULES.rule(ERROR)
def kv_connector(subject: KvSubject) -> Iterator[Finding]:
    """kv_connector is missing or not MooncakeConnector.

    MooncakeStoreConnector, PyNcclConnector and the like are other connectors, which this package does not bring; the
    vLLM wheel 0.6.4.post1 has none at all.
    """
    value = subject.fields.get("kv_connector")
    if (
        isinstance(subject.document.value, dict)
        and value != "MooncakeConnector"
        and (value is None or isinstance(value, str))
    ):
        given = "missing" if value is None else repr(shorten(value))
        what = f"kv_connector is {given}, this package brings MooncakeConnector"
        yield Finding(("kv_connector",), what, 'write "kv_connector": "MooncakeConnector"')


@KV_RULES.rule(ERROR)
def kv_role(subject: KvSubject) -> Iterator[Finding]:
    """kv_role is missing or not kv_producer (prefill) or kv_consumer (decode).

    kv_both exists in V1 only; a V0 pair has one producer and one consumer.
    """
    value = subject.fields.get("kv_role")
    if (
        isinstance(subject.document.value, dict)
        and (value is None or isinstance(value, str))
        and value not in ROLE_NAMES
    ):
        given = "missing" if value is None else repr(shorten(value))
        what = f"kv_role is {given}, a pair has one kv_producer and one kv_consumer"
        yield Finding(("kv_role",), what, 'write "kv_producer" on the prefill side, "kv_consumer" on the decode side')


@KV_RULES.rule(ERROR)
def kv_role_side(subject: KvSubject) -> Iterator[Finding]:
    """kv_role is the other side's: --role says prefill and kv_role says kv_consumer, or the reverse."""
    value = subject.get("kv_role")
    if value in ROLE_NAMES and subject.role is not None and ROLE_NAMES[value] != subject.role:
        right = next(name for name, role in ROLE_NAMES.items() if role == subject.role)
        yield Finding(("kv_role",), f"kv_role is {value} on the {subject.role} side", f'write "kv_role": "{right}"')


@KV_RULES.rule(ERROR)
def kv_rank(subject: KvSubject) -> Iterator[Finding]:
    """kv_rank does not fit kv_role: the producer is rank 0, the consumer rank 1. There is no third."""
    role = subject.get("kv_role")
    if role not in RANKS or "kv_rank" in subject.fields and subject.get("kv_rank") is None:
        return
    if subject.number("kv_rank") != RANKS[role]:
        given = shorten(str(subject.fields.get("kv_rank", "missing")))
        what = f"kv_rank is {given}, {role} has rank {RANKS[role]}"
        yield Finding(("kv_rank",), what, f'write "kv_rank": {RANKS[role]}')


@KV_RULES.rule(ERROR)
def kv_parallel_size(subject: KvSubject) -> Iterator[Finding]:
    """kv_parallel_size is not 2. V0 pairs one prefill with one decode instance; its default of 1 never works.

    It has nothing to do with tensor parallelism. For more capacity run several pairs behind the proxy.
    """
    if not isinstance(subject.document.value, dict):
        return
    if "kv_parallel_size" in subject.fields and subject.get("kv_parallel_size") is None:
        return
    if subject.number("kv_parallel_size") != 2:
        given = subject.fields.get("kv_parallel_size", "missing (and 1 by default)")
        yield Finding(
            ("kv_parallel_size",),
            f"kv_parallel_size is {shorten(str(given))}, a pair has 2",
            'write "kv_parallel_size": 2',
        )


@KV_RULES.rule(ERROR)
def kv_buffer_size(subject: KvSubject) -> Iterator[Finding]:
    """kv_buffer_size is not a positive number of bytes. 2e9, "2e9", 2000000000, "2GB" and "2GiB" are."""
    value = subject.fields.get("kv_buffer_size", DEFAULT_BUFFER_BYTES)
    size = parse_size_bytes(value)
    if size is None or size <= 0 or (isinstance(value, str) and not BUFFER_SIZE.fullmatch(value)):
        fix = "write the bytes, for example 2e9; `mooncake-v0 size` computes them for a model"
        yield Finding(
            ("kv_buffer_size",), f"kv_buffer_size is {shorten(json.dumps(value))}, not a number of bytes above 0", fix
        )


@KV_RULES.rule(WARNING)
def kv_buffer_small(subject: KvSubject) -> Iterator[Finding]:
    """kv_buffer_size is smaller than the KV cache of one longest prompt.

    Such a prompt is never transferred; decode computes it again. `mooncake-v0 size` computes the size for a model.
    """
    size = parse_size_bytes(subject.fields.get("kv_buffer_size", DEFAULT_BUFFER_BYTES))
    needed = subject.prompt_bytes
    if needed is not None and size is not None and 0 < size < needed:
        what = f"kv_buffer_size is {size} bytes, one prompt of {subject.max_prompt_tokens} tokens needs {needed} on each rank"
        yield Finding(("kv_buffer_size",), what, f"write at least {needed}, times the prompts in flight")


@KV_RULES.rule(ERROR)
def kv_buffer_device(subject: KvSubject) -> Iterator[Finding]:
    """kv_buffer_device is neither cpu nor cuda."""
    value = subject.get("kv_buffer_device")
    if value is not None and value not in ("cpu", "cuda"):
        yield Finding(
            ("kv_buffer_device",), f"kv_buffer_device is {shorten(value)!r}, not cpu or cuda", 'write "cpu", or "cuda"'
        )


@KV_RULES.rule(WARNING)
def kv_port_clash(subject: KvSubject) -> Iterator[Finding]:
    """kv_port is the API's port. The Mooncake connector does not use kv_port, so one of the two was mixed up."""
    if subject.api_port is not None and subject.number("kv_port") == subject.api_port:
        yield Finding(("kv_port",), f"kv_port {subject.api_port} is the API's --port", "remove kv_port")


@KV_RULES.rule(INFO)
def kv_unused_field(subject: KvSubject) -> Iterator[Finding]:
    """kv_ip and kv_port have no effect with MooncakeConnector: the addresses are those of the mooncake.json."""
    for name in ("kv_ip", "kv_port"):
        is_api_port = subject.api_port is not None and subject.number(name) == subject.api_port
        if subject.get(name) is not None and not is_api_port:
            yield Finding((name,), f"{name} has no effect with MooncakeConnector", "remove it")
