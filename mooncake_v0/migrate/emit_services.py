"""V1 launch files for systemd and supervisord. Called by `emit`."""

from __future__ import annotations

import shlex
from typing import Sequence

from mooncake_v0.migrate.convert import V1Instance
from mooncake_v0.migrate.emit_text import REFERENCE, header, one_line

_REPLACED = frozenset(["Environment", "EnvironmentFile", "ExecStart"])


def unit_file(item: V1Instance, target: str) -> str:
    """The original unit with new variables and command; what the operator must set comes from an env file."""
    lines = [*header(item, target)]
    section = ""
    entries = item.original.invocation.shape.document or []
    for name, key, value, _ in [*entries, ("", "", "", 0)]:
        if name != section:
            section = name
            lines += ["", f"[{name}]"] if name else []
            lines += _service_lines(item) if name == "Service" else []
        if name and not (name == "Service" and key in _REPLACED):
            lines.append(f"{key}={one_line(value)}")
    return "\n".join([*lines, ""])


def _service_lines(item: V1Instance) -> list[str]:
    lines = []
    unset = [name for name, value in item.env if REFERENCE.fullmatch(value)]
    if unset:
        lines.append(f"# set in this file, readable by root only: {', '.join(unset)}")
        lines.append(f"EnvironmentFile=/etc/vllm/{item.name}.env")
    for name, value in item.env:
        if name not in unset:
            lines.append(f"Environment={_unit_word(f'{name}={value}', dollar='$')}")
    lines.append("ExecStart=/usr/bin/env " + " ".join(_unit_word(word, dollar="$$") for word in item.argv))
    return lines


def _unit_word(word: str, *, dollar: str) -> str:
    """One word in systemd's quoting: %% for %, and $$ for $ where variables would be replaced."""
    if REFERENCE.fullmatch(word):
        return word
    escaped = one_line(word).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", dollar)
    plain = escaped and all(character.isalnum() or character in "-_./:=,+@%$" for character in escaped)
    return escaped if plain else f'"{escaped}"'


def supervisord_file(items: Sequence[V1Instance], target: str) -> str:
    """One program per instance, with the original's other options."""
    lines: list[str] = []
    for item in items:
        document = item.original.invocation.shape.document or {}
        lines += [line.replace("#", ";", 1) for line in header(item, target)]
        lines.append(f"[program:{item.name}-v1]")
        command = " ".join(shlex.quote(one_line(word)) for word in item.argv)
        lines.append(f"command={_referenced(command)}")
        pairs = [f"{name}={_environment_value(value)}" for name, value in item.env]
        lines += [f"environment={','.join(pairs)}"] if pairs else []
        kept = {
            key: value for key, value in document.get("options", {}).items() if key not in ("command", "environment")
        }
        lines += [f"{key}={one_line(value)}" for key, value in kept.items()]
        lines.append("")
    return "\n".join(lines)


def _referenced(text: str) -> str:
    """Percent signs doubled; `${NAME}`, which supervisord takes from its own environment, in its notation."""
    doubled = text.replace("%", "%%")
    return REFERENCE.sub(
        lambda match: f"%(ENV_{match[1]})s",
        doubled.replace("'${", "${").replace("}'", "}") if "'${" in doubled else doubled,
    )


def _environment_value(value: str) -> str:
    match = REFERENCE.fullmatch(value)
    if match:
        return f'"%(ENV_{match[1]})s"'
    escaped = one_line(value).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
