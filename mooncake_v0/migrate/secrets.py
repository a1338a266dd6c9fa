"""Finds secrets in what was read and masks them in everything that is written.

`Secrets` collects values while files are read (variables and flags whose name says so, passwords in URLs, bearer
tokens, well-known token shapes, Kubernetes Secrets); `mask` replaces them wherever they turn up again. Called by
`files` on every text and by `report`, `render` and `emit` on every string that leaves the program.
"""

from __future__ import annotations

import base64
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

MASK = "***"
_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_PARTS = frozenset(
    ["key", "token", "secret", "password", "passwords", "passwd", "passphrase", "credential", "credentials"]
)
_SECRET_ENDINGS = ("token", "secret", "password", "passwd", "passphrase", "apikey", "secretkey", "accesskey")
# a key file, a token type, the name of a Kubernetes Secret: about a secret, not one
_ABOUT = frozenset(["file", "path", "ids", "name", "ref", "dir", "type", "field", "length", "count"])
_ASSIGNED = re.compile(
    rf"""(?<![\w$])["']?({_NAME})["']?\s*(?:=|:(?!//))\s*(?:"([^"\n]*)"|'([^'\n]*)'|([^\s"',;{{}}\[\]&|]+))""",
    re.IGNORECASE,
)
_IN_PROSE = re.compile(rf"""(?<![\w$])({_NAME})=(?:"([^"\n]*)"|'([^'\n]*)'|([^\s"',;{{}}\[\]&|`]+))""")
_FLAG = re.compile(rf"""(--{_NAME})(?:=|\s+\\?\s*)(?:"([^"\n]*)"|'([^'\n]*)'|([^\s"'\\-][^\s"']*))""", re.IGNORECASE)
_YAML_PAIR = re.compile(
    rf"""name:\s*["']?({_NAME})["']?\s*[,\n]\s*value:\s*(?:"([^"\n]*)"|'([^'\n]*)'|([^\s"',}}]+))""", re.IGNORECASE
)
_LIST_ITEM = re.compile(rf"""["'](--{_NAME})["']\s*,\s*["']([^"'\n]*)["']""", re.IGNORECASE)
_YAML_ITEM = re.compile(rf"""-\s*["']?(--{_NAME})["']?\s*\n\s*-\s*["']?([^\s"']+)["']?""", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|xox[abp]-[A-Za-z0-9-]{8,}|AKIA[A-Z0-9]{12,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)"
)
_BEARER = re.compile(r"\b(?:Bearer|Basic)\s+(?!\$|\{)([A-Za-z0-9._~+/=-]+)")
_USERINFO = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/'\"@]*):([^\s/'\"]*)@", re.IGNORECASE)
_USER_ONLY = re.compile(r"\b([a-z][a-z0-9+.-]*://)([^\s/'\"@:]+)@", re.IGNORECASE)
_QUERY = re.compile(rf"([?&]{_NAME}=)([^&\s'\"]+)", re.IGNORECASE)
_SHORTEST = 4
_LONG = 10
# words that stand in for a secret, or that every report contains: masked where they are written as a secret only
# fmt: off
_WORDS = frozenset(
    [
        "empty", "dummy", "none", "null", "true", "false", "required", "vllm", "mooncake", "prefill", "decode", "proxy",
        "etcd", "redis", "secret", "token", "tokens", "password", "bearer", "file", "model", "text", "name", "value",
    ]
)
# fmt: on


def is_secret_name(name: str) -> bool:
    """Whether a variable, flag or key of this name holds a secret: HF_TOKEN, --api-key, redisPassword; not a bare "key"."""
    parts = [part.lower() for part in _PARTS.findall(name)]
    if parts in ([], ["key"]):
        return False
    following = [*parts[1:], ""]
    return any(
        (part in _SECRET_PARTS or part.endswith(_SECRET_ENDINGS)) and after not in _ABOUT
        for part, after in zip(parts, following)
    )


def masked_value(name: str, value: str) -> str:
    """A variable's or flag's value, masked if its name says that it is secret; references to variables stay."""
    return value if not value or value.startswith("$") or not is_secret_name(name) else MASK


def _without_value(match: re.Match[str]) -> str:
    value = next((group for group in match.groups()[1:] if group), "")
    if not value or not is_secret_name(match[1]):
        return match[0]
    head, _, tail = match[0].rpartition(value)
    return head + MASK + tail


def _literal(value: str) -> str:
    """The expression that finds a secret; a short word may be part of ordinary words, so it must stand alone."""
    literal = re.escape(value)
    return literal if len(value) >= _LONG or not value.isalpha() else rf"(?<![A-Za-z0-9]){literal}(?![A-Za-z0-9])"


class Secrets:
    """The secrets of one run."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None

    def add(self, value: str) -> None:
        """Remember a secret value; references to variables and short words that would mask prose are not kept."""
        value = value.strip()
        if len(value) >= _SHORTEST and value.lower() not in _WORDS and not re.match(r"\$|\{\{|\*+$", value):
            self._values.add(value)
            self._pattern = None

    def scan(self, text: str, *, prose: bool = False) -> None:
        """Collect the secrets that a text of any format shows; in prose, "token: word" is no assignment."""
        for pattern in (_IN_PROSE if prose else _ASSIGNED, _FLAG, _YAML_PAIR, _LIST_ITEM, _YAML_ITEM):
            for match in pattern.finditer(text):
                if is_secret_name(match[1]):
                    self.add(next((group for group in match.groups()[1:] if group), ""))
        for match in _SHAPES.finditer(text):
            self.add(match[0])
        for match in _BEARER.finditer(text):
            self.add(match[1])
        for match in _USERINFO.finditer(text):
            self.add(match[3])

    def add_encoded(self, value: str) -> None:
        """A base64 value of a Kubernetes Secret: both forms are secret."""
        self.add(value)
        try:
            self.add(base64.b64decode(value, validate=True).decode())
        except ValueError:
            return

    def mask(self, text: str) -> str:
        """The text without secrets."""
        if self._pattern is None and self._values:
            self._pattern = re.compile(
                "|".join(map(_literal, sorted(self._values, key=lambda item: (-len(item), item))))
            )
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        text = _USERINFO.sub(rf"\1\2:{MASK}@", text)
        text = _QUERY.sub(lambda m: m[1] + MASK if is_secret_name(m[1].strip("?&=")) else m[0], text)
        text = _SHAPES.sub(MASK, text)
        return text

    def mask_source(self, text: str) -> str:
        """A piece of the input, quoted in a note: whatever is written as a secret goes, however short it is."""
        for pattern in (_ASSIGNED, _FLAG, _LIST_ITEM):
            text = pattern.sub(_without_value, text)
        return self.mask(_BEARER.sub(lambda match: match[0].replace(match[1], MASK), text))

    def mask_deep(self, value: Any) -> Any:
        """A copy of plain data or frozen dataclasses with every string masked."""
        if isinstance(value, str):
            return self.mask(value)
        if isinstance(value, dict):
            return {
                self.mask_deep(key): MASK
                if isinstance(item, str) and item and is_secret_name(str(key))
                else self.mask_deep(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return type(value)(self.mask_deep(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: self.mask_deep(getattr(value, f.name)) for f in fields(value) if f.init})
        return value
