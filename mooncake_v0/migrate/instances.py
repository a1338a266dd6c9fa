"""One vLLM server of today, out of the command that starts it and the files that this names. Called by `deployment`.

The instance knows its role, model, address, mooncake.json, architecture and quantization; where only a name hints at the
architecture, it says that this is a guess.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

from mooncake_v0.migrate.facts import guess_architecture
from mooncake_v0.migrate.json_values import Parsed, parse_mooncake_json, parse_object
from mooncake_v0.migrate.lookup import find_file
from mooncake_v0.migrate.records import Found, Invocation, Place, TextFile
from mooncake_v0.migrate.secrets import masked_value
from mooncake_v0.migrate.server_arguments import (
    KV_FLAG,
    SERVER_MODULE,
    ServerArguments,
    config_words,
    parse_server,
)

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
_ANY_HOST = frozenset(["", "0.0.0.0", "::", "[::]", "*"])


@dataclass(frozen=True)
class MooncakeFile:
    """A mooncake.json; values as read, without checks: the deployment runs as it is."""

    values: Mapping[str, Any]
    place: Place

    def text(self, key: str) -> str:
        value = self.values.get(key)
        return "" if value is None else str(value)

    @property
    def protocol(self) -> str:
        # V0's default, see the table of its fields
        return self.text("protocol") or "tcp"

    def identity(self) -> str:
        return json.dumps(self.values, sort_keys=True, default=str)

    def endpoint(self, role: str) -> tuple[str, str]:
        """Host and port of one side, as written."""
        return split_address(self.text("prefill_url" if role == "prefill" else "decode_url"))


@dataclass(frozen=True)
class Instance:
    """One vLLM server of today.

    role: prefill, decode, both (kv_both) or plain (no KV transfer); host "" where nothing says it
    kv:   the object of --kv-transfer-config, None if there is none or it cannot be read
    """

    name: str
    role: str
    arguments: ServerArguments
    env: tuple[tuple[str, str], ...]
    kv: Mapping[str, Any] | None
    kv_repaired: str
    config: MooncakeFile | None
    host: str
    port: str
    architecture: str
    architecture_guessed: bool
    quantization: str
    invocation: Invocation

    @property
    def connector(self) -> str:
        return str((self.kv or {}).get("kv_connector") or "")

    @property
    def launched_by_us(self) -> bool:
        return self.invocation.launched_by_us

    @property
    def model(self) -> str:
        return self.arguments.model

    @property
    def tensor_parallel_size(self) -> int:
        return _integer(self.arguments.value("--tensor-parallel-size", "-tp"), 1)

    @property
    def pipeline_parallel_size(self) -> int:
        return _integer(self.arguments.value("--pipeline-parallel-size", "-pp"), 1)

    @property
    def data_parallel_size(self) -> int:
        return _integer(self.arguments.value("--data-parallel-size", "-dp"), 1)

    def variable(self, name: str) -> str | None:
        return dict(self.env).get(name)


def split_address(address: str) -> tuple[str, str]:
    """Host and port of "host:port", "[v6]:port" or a URL; the port is "" if there is none."""
    address = re.sub(r"^[a-z]+://", "", address.strip()).split("/")[0].rpartition("@")[2]
    match = re.fullmatch(r"\[([^\]]*)\](?::(\d+))?|([^:]*):(\d+)|([^:]*)|(.*:.*):(\d{4,5})|(.*)", address)
    assert match is not None
    host = match[1] or match[3] or match[5] or match[6] or match[8] or ""
    return host, match[2] or match[4] or match[7] or ""


def _integer(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"[1-9]\d{0,4}", text) else default


def mooncake_files(found: Found) -> dict[str, MooncakeFile]:
    """mooncake.json files by path, wherever they were: files, here documents, ConfigMaps."""
    configs: dict[str, MooncakeFile] = {}
    for file in found.files:
        if file.path.endswith((".py", ".yaml", ".yml")) or "{" not in file.text:
            continue
        parsed = parse_mooncake_json(file.text)
        if parsed is None:
            if "prefill_url" in file.text and file.path.endswith(".json"):
                found.note(file.place, file.path, "looks like a mooncake.json, but is no JSON object")
            continue
        if parsed.repaired:
            found.note(file.place, file.path, f"read in spite of {parsed.repaired}")
        configs[file.path] = MooncakeFile(parsed.value, file.place)
    return configs


def read_instance(invocation: Invocation, configs: Mapping[str, MooncakeFile], found: Found) -> Instance:
    arguments = _arguments(invocation, found)
    for remark in arguments.odd:
        found.note(invocation.place, remark, "read on past it")
    kv = _kv(arguments, invocation, found)
    role = _role(kv, arguments)
    config = _config_of(invocation, role, configs, found)
    architecture, guessed = _architecture(arguments.model, found.files)
    host = config.endpoint(role)[0] if config and role in ("prefill", "decode") else ""
    own = arguments.value("--host")
    return Instance(
        name="",
        role=role,
        arguments=arguments,
        env=tuple((name, masked_value(name, value)) for name, value in invocation.env),
        kv=kv.value if kv else None,
        kv_repaired=kv.repaired if kv else "",
        config=config,
        host=host or invocation.host or dict(invocation.env).get("VLLM_HOST_IP") or ("" if own in _ANY_HOST else own),
        port=arguments.value("--port") or "8000",
        architecture=architecture,
        architecture_guessed=guessed,
        quantization=arguments.value("--quantization", "-q") or _quantization(arguments.model, found.files),
        invocation=invocation,
    )


def _arguments(invocation: Invocation, found: Found) -> ServerArguments:
    """The arguments, with those of a `--config` file before the others, which win."""
    arguments = parse_server(invocation.argv)
    path = arguments.value("--config")
    if not path:
        return arguments
    file = find_file(found.files, path, invocation.place.file, invocation.mounts)
    words = config_words(file.text) if file is not None else []
    if file is None or not words:
        found.note(
            invocation.place, f"--config {path}", "not among the given paths, or no mapping; its flags are not known"
        )
        return arguments
    found.used.add(file.path)
    start = ["vllm", "serve"] if arguments.entrypoint == "serve" else ["python3", "-m", SERVER_MODULE]
    model = [arguments.model] if arguments.entrypoint == "serve" and arguments.model else []
    merged = parse_server([*start, *model, *words, *_rest(arguments)])
    return replace(merged, flags=tuple(flag for flag in merged.flags if flag.name != "--config"))


def _rest(arguments: ServerArguments) -> list[str]:
    return [word for flag in arguments.flags for word in (flag.name, *flag.values)]


def _kv(arguments: ServerArguments, invocation: Invocation, found: Found) -> Parsed | None:
    text = arguments.value(KV_FLAG)
    if not text:
        return None
    parsed = parse_object(text)
    if parsed is None:
        found.note(invocation.place, f"{KV_FLAG} {text}", "not a JSON object; its role is not known")
    elif parsed.repaired:
        found.note(invocation.place, f"{KV_FLAG} {text}", f"read in spite of {parsed.repaired}")
    return parsed


def _role(kv: Parsed | None, arguments: ServerArguments) -> str:
    if kv is None:
        return "plain"
    role = _ROLES.get(str(kv.value.get("kv_role")))
    if role is None and str(kv.value.get("kv_rank")) in ("0", "1"):
        role = "prefill" if str(kv.value["kv_rank"]) == "0" else "decode"
    return role or "plain"


def _config_of(
    invocation: Invocation, role: str, configs: Mapping[str, MooncakeFile], found: Found
) -> MooncakeFile | None:
    path = dict(invocation.env).get("MOONCAKE_CONFIG_PATH", "")
    if role == "plain" and not path:
        return None
    candidates = [file for file in found.files if file.path in configs]
    if path:
        file = find_file(candidates, path, invocation.place.file, invocation.mounts)
        if file is not None:
            return configs[file.path]
    distinct = {config.identity(): config for config in configs.values()}
    if len(distinct) == 1:
        if not path:
            found.note(
                invocation.place, "MOONCAKE_CONFIG_PATH is not set", "the only mooncake.json given is taken for its own"
            )
        return next(iter(distinct.values()))
    if path:
        found.note(invocation.place, f"MOONCAKE_CONFIG_PATH={path}", "that file is not among the given paths")
    return None


def _architecture(model: str, files: Sequence[TextFile]) -> tuple[str, bool]:
    config = _model_config(model, files)
    if config and config.get("architectures"):
        return str(config["architectures"][0]), False
    guess = guess_architecture(model)
    return (guess.replacement, True) if guess else ("", True)


def _model_config(model: str, files: Sequence[TextFile]) -> dict[str, Any] | None:
    """The checkpoint's own config.json, if it was given."""
    found = []
    for file in files:
        if file.path.endswith(".json") and '"architectures"' in file.text:
            parsed = parse_object(file.text)
            if parsed and isinstance(parsed.value.get("architectures"), list):
                found.append((file.path, parsed.value))
    base = model.rstrip("/").rpartition("/")[2]
    named = [value for path, value in found if base and base in path.split("/")]
    return named[0] if named else found[0][1] if len(found) == 1 else None


def _quantization(model: str, files: Sequence[TextFile]) -> str:
    config = _model_config(model, files)
    method = config.get("quantization_config", {}) if config else {}
    if isinstance(method, dict) and method.get("quant_method"):
        return str(method["quant_method"]).replace("-", "_")
    match = re.search(r"(?:^|[-_./])(gptq|awq|fp8|gguf|bnb|bitsandbytes|aqlm)(?=$|[-_./])", model.lower())
    return {"bnb": "bitsandbytes"}.get(match[1], match[1]) if match else ""
