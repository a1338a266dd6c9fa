"""A parsed JSON text as data: its value, the place of every value in it, and the mistakes that were found.

Made by `json_parser.parse`; the rules read it, and `--fix` replaces exactly the characters of one value.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Tuple, Union

Path = Tuple[Union[str, int], ...]

PLAIN_KEY = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """A mistake in the text: the rule's name, the offset, the path of the value around it, what and how to fix it."""

    rule: str
    offset: int
    path: Path
    what: str
    fix: str


@dataclass(frozen=True)
class Span:
    """Offsets of a member: where its key starts (its value, in an array), and the value's start and end."""

    key: int
    start: int
    end: int


@dataclass(frozen=True)
class Document:
    """A parsed text. `value` is None and `complete` False when parsing had to stop."""

    text: str
    value: Any = None
    complete: bool = False
    problems: tuple[Problem, ...] = ()
    spans: dict[Path, Span] = field(default_factory=dict)

    def line_column(self, offset: int) -> tuple[int, int]:
        """1-based line and column (in characters) of an offset."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def place(self, path: Path) -> tuple[int, int] | None:
        """Line and column of a value, or of its nearest parent that is in the text."""
        while path not in self.spans:
            if not path:
                return None
            path = path[:-1]
        return self.line_column(self.spans[path].start)


def render_path(path: Path) -> str:
    """('a', 0, 'b c') as $.a[0]['b c']."""
    parts = []
    for step in path:
        if isinstance(step, int):
            parts.append(f"[{step}]")
        else:
            parts.append(f".{shorten(step)}" if PLAIN_KEY.fullmatch(step) else f"[{shorten(step)!r}]")
    return "$" + "".join(parts)


def shorten(text: str, limit: int = 80) -> str:
    """Text for a message: never longer than limit characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quote(text: str) -> str:
    """The text as a JSON string literal; half of a surrogate pair, which no file can hold, is escaped."""
    return json.dumps(text, ensure_ascii=any("\ud800" <= one <= "\udfff" for one in text))
