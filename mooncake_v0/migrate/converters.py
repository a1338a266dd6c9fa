"""The actions of flags.csv and envs.csv that need code: one function per action, registered in `CONVERTERS`.

A converter gets the flag as written, its row and the `Conversion` it adds to. Called by `convert`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable

from mooncake_v0.migrate.facts import Fact
from mooncake_v0.migrate.json_values import compact, parse_object
from mooncake_v0.migrate.server_arguments import Flag

_FALSE = frozenset(["false", "0", "no", "off"])
_ATTENTION = {"FLASH_ATTN": "FLASH_ATTN", "FLASHINFER": "FLASHINFER"}
_SPECULATIVE_KEYS = {
    "--speculative-model": "model",
    "--speculative-model-quantization": "quantization",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "-spec-draft-tp": "draft_tensor_parallel_size",
    "--speculative-max-model-len": "max_model_len",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
}


class Conversion:
    """What the conversion of one instance has produced so far; `finish` adds the flags that several others make up."""

    def __init__(self, target: str):
        self.target = target
        self.flags: list[Flag] = []
        self.env: dict[str, str] = {}
        self.changes: list[tuple[str, str, str, str, str, str]] = []
        self.speculative: dict[str, Any] = {}
        self.rope: dict[str, Any] = {}
        self.patterns: list[str] = []

    def change(self, row: Fact, before: str, after: str, *, why: str = "") -> None:
        self.changes.append(
            (row.name, before, after, row.severity or "info", why or row.text or _standard(row), row.source)
        )

    def remark(self, name: str, value: str, why: str, row: Fact) -> None:
        written = f"{name} {value}".strip()
        self.changes.append((name, written, written, "info", why, row.source))

    def finish(self) -> None:
        if self.speculative:
            self.flags.append(Flag("--speculative-config", (compact(self.speculative),)))
        if self.rope:
            self._overrides({"rope_parameters": self.rope})
        if self.patterns:
            self.flags.append(Flag("--ignore-patterns", tuple(self.patterns)))

    def _overrides(self, new: dict[str, Any]) -> None:
        old = next((flag for flag in self.flags if flag.name == "--hf-overrides"), None)
        parsed = parse_object(" ".join(old.values)) if old else None
        if old is not None:
            self.flags.remove(old)
        self.flags.append(Flag("--hf-overrides", (compact({**(parsed.value if parsed else {}), **new}),)))


def _standard(row: Fact) -> str:
    return {"removed": f"removed in {row.since}", "renamed": f"renamed in {row.since}"}.get(row.status, "")


def _written(flag: Flag) -> str:
    return " ".join([flag.name, *flag.values])


def _value(flag: Flag) -> str:
    return " ".join(flag.values)


def _model(flag: Flag, row: Fact, conversion: Conversion) -> None:
    conversion.change(
        row, _written(flag), f"vllm serve {_value(flag)}", why="the model is the first argument of vllm serve"
    )


def _api_key(flag: Flag, row: Fact, conversion: Conversion) -> None:
    conversion.env["VLLM_API_KEY"] = _value(flag)
    why = "a variable is not shown in the process list, and the flag takes a list now, which swallows a model behind it"
    conversion.change(row, _written(flag), "VLLM_API_KEY", why=why)


def _task(flag: Flag, row: Fact, conversion: Conversion) -> None:
    new = {"generate": (), "auto": (), "embedding": (("--runner", "pooling"), ("--convert", "embed"))}
    flags = new.get(_value(flag), (("--runner", "pooling"),))
    conversion.flags += [Flag(name, (value,)) for name, value in flags]
    conversion.change(row, _written(flag), " ".join(f"{name} {value}" for name, value in flags))


def _tokenizer_mode(flag: Flag, row: Fact, conversion: Conversion) -> None:
    if _value(flag) == "slow":
        conversion.change(row, _written(flag), "")
    else:
        conversion.flags.append(flag)


def _guided_backend(flag: Flag, row: Fact, conversion: Conversion) -> None:
    new = Flag(row.replacement, flag.values)
    conversion.flags.append(new)
    conversion.change(row, _written(flag), _written(new))


def _rope(flag: Flag, row: Fact, conversion: Conversion) -> None:
    if flag.name == "--rope-theta":
        conversion.rope["rope_theta"] = _number(_value(flag))
    else:
        parsed = parse_object(_value(flag))
        values = dict(parsed.value) if parsed else {}
        if "type" in values:
            values = {"rope_type": values.pop("type"), **values}
        conversion.rope.update(values)
    conversion.change(row, _written(flag), "--hf-overrides rope_parameters")


def _limit_mm(flag: Flag, row: Fact, conversion: Conversion) -> None:
    text = ",".join(flag.values)
    pairs = re.findall(r"(\w+)\s*=\s*(\d+)", text)
    parsed = parse_object(text) if not pairs else None
    value = {name: int(count) for name, count in pairs} if pairs else (parsed.value if parsed else {})
    if value:
        new = Flag(flag.name, (compact(value),))
        conversion.flags.append(new)
        conversion.change(row, _written(flag), _written(new))
    else:
        conversion.change(row, _written(flag), "")


def _chunked_prefill(flag: Flag, row: Fact, conversion: Conversion) -> None:
    name = "--no-enable-chunked-prefill" if _value(flag).lower() in _FALSE else "--enable-chunked-prefill"
    conversion.flags.append(Flag(name, ()))
    if _written(flag) != name:
        conversion.change(row, _written(flag), name)


def _speculative(flag: Flag, row: Fact, conversion: Conversion) -> None:
    key, value = _SPECULATIVE_KEYS[flag.name], _value(flag)
    if key == "model" and value == "[ngram]":
        conversion.speculative["method"] = "ngram"
    else:
        conversion.speculative[key] = _number(value)
    conversion.change(row, _written(flag), f"--speculative-config {key}")


def _ignore_patterns(flag: Flag, row: Fact, conversion: Conversion) -> None:
    conversion.patterns += flag.values
    conversion.change(row, _written(flag), "--ignore-patterns with all patterns")


def _device(flag: Flag, row: Fact, conversion: Conversion) -> None:
    conversion.change(row, _written(flag), "")


def _split_commas(flag: Flag, row: Fact, conversion: Conversion) -> None:
    new = Flag(flag.name, tuple(part for value in flag.values for part in value.split(",") if part))
    conversion.flags.append(new)
    if new != flag:
        conversion.change(row, _written(flag), _written(new))


def _env_to_flag(flag: Flag, row: Fact, conversion: Conversion) -> None:
    value = _value(flag)
    new: Flag | None = None
    if flag.name == "VLLM_ATTENTION_BACKEND" and value.upper() in _ATTENTION:
        new = Flag("--attention-backend", (_ATTENTION[value.upper()],))
    elif flag.name == "VLLM_TORCH_PROFILER_DIR":
        new = Flag("--profiler-config", (compact({"profiler": "torch", "torch_profiler_dir": value}),))
    if new is not None:
        conversion.flags.append(new)
    conversion.change(row, f"{flag.name}={value}", _written(new) if new else "")


def _host_ip(flag: Flag, row: Fact, conversion: Conversion) -> None:
    conversion.env["VLLM_HOST_IP"] = _value(flag)
    conversion.change(row, f"HOST_IP={_value(flag)}", f"VLLM_HOST_IP={_value(flag)}")


def _kv_config(flag: Flag, row: Fact, conversion: Conversion) -> None:
    """Only reached for a value whose role is not known: it is left out, and the report says so."""
    why = "its kv_role cannot be read; V1 requires one"
    conversion.changes.append((flag.name, _written(flag), "", "change", why, row.source))


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


CONVERTERS: dict[str, Callable[[Flag, Fact, Conversion], None]] = {
    "api_key": _api_key,
    "chunked_prefill": _chunked_prefill,
    "device": _device,
    "env_to_flag": _env_to_flag,
    "guided_backend": _guided_backend,
    "host_ip": _host_ip,
    "ignore_patterns": _ignore_patterns,
    "kv_config": _kv_config,
    "limit_mm": _limit_mm,
    "model": _model,
    "rope": _rope,
    "speculative": _speculative,
    "split_commas": _split_commas,
    "task": _task,
    "tokenizer_mode": _tokenizer_mode,
}
