"""Pieces that the launch files of every shape share: the comment on top, exports, folded commands. Used by `emit*`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Sequence

from mooncake_v0.migrate.convert import V1Instance, quote
from mooncake_v0.migrate.secrets import is_secret_name

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def one_line(text: str) -> str:
    """Text that cannot leave a comment line."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text).strip()


def with_secrets_referenced(item: V1Instance) -> V1Instance:
    """The instance with every secret variable as a reference to itself, `${NAME}`, for the operator to set."""
    env = tuple((name, f"${{{name}}}" if is_secret_name(name) else value) for name, value in item.env)
    argv = [
        f"${{{_variable(before)}}}" if _is_secret_value(before, word) else word
        for before, word in _with_previous(item.argv)
    ]
    return replace(item, env=env, argv=tuple(argv))


def _with_previous(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(["", *words], words))


def _is_secret_value(flag: str, word: str) -> bool:
    return flag.startswith("--") and is_secret_name(flag) and not word.startswith("-")


def _variable(flag: str) -> str:
    return flag.lstrip("-").upper().replace("-", "_").replace(".", "_")


def header(item: V1Instance, target: str) -> list[str]:
    """Comment lines: what this is, and why each thing differs from V0."""
    lines = [f"# {item.name} ({item.role}) for vLLM {target}; V0 was at {item.original.invocation.place}"]
    for change in item.changes:
        if change.before != change.after:
            lines.append(f"# {change.before or 'new'} -> {change.after or 'gone'}: {change.why}")
    lines += [f"# left out, no release knows it: {flag}" for flag in item.not_carried]
    return [one_line(line) for line in lines]


def exports(env: Sequence[tuple[str, str]]) -> list[str]:
    """Lines for bash; a variable that the operator must set stops the script with a message if it is not."""
    return [f"export {name}={_bash_value(name, value)}" for name, value in env]


def _bash_value(name: str, value: str) -> str:
    match = REFERENCE.fullmatch(value)
    return f'"${{{match[1]}:?set {match[1]} before starting this}}"' if match else quote(value)


def script_command(argv: Sequence[str]) -> str:
    """A command over several lines, one flag a line."""
    lines = [""]
    for word in argv:
        if re.match(r"--|-[a-z]", word) and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {quote(word)}".strip()
    return " \\\n  ".join(lines)
