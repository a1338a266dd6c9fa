"""Env files (NAME=VALUE lines), as docker, compose and systemd read them. No expansion, nothing is run."""

from __future__ import annotations

import re

_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*$")

# one value without spaces, or in quotes: `NAME=value command` is a command line, not a line of an env file
_VALUE = re.compile(r"""\s*(?:export\s+)?[A-Za-z_][A-Za-z0-9_]*\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"']*)\s*(?:#.*)?$""")


def parse_env_file(text: str) -> list[tuple[str, str]]:
    """Pairs in order; quotes around a value go, ` #` comments behind an unquoted one too."""
    pairs = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and not line.lstrip().startswith("#"):
            pairs.append((match[1], _unquoted(match[2])))
    return pairs


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return re.split(r"\s+#", value)[0]


def looks_like_env_file(text: str) -> bool:
    """Whether every line is an assignment, a comment or empty, and there is at least one assignment."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and all(_VALUE.match(line) for line in lines)
