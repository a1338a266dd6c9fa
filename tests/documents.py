"""The documentation as data: fenced blocks and the commands in them. Read by the tests of the documents."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GENERATED = ("commands.md", "configuration.md", "findings.md")
WRITTEN = [path for path in DOCUMENTS if path.name not in GENERATED]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block; heading is the last one before it."""

    path: Path
    heading: str
    language: str
    text: str

    @property
    def label(self) -> str:
        first = self.text.splitlines()[0] if self.text else ""
        return f"{self.path.name}: {first[:60]}"


@dataclass(frozen=True)
class Transcript:
    """A command of a console block, and the output that the document shows."""

    block: Block
    command: str
    output: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.block.path.name}: {self.command[:60]}"


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text[: match.start()]), re.MULTILINE)
        yield Block(path, headings[-1] if headings else "", match[2], textwrap.dedent(match[3]))


def commands(block: Block) -> list[str]:
    """The shell commands of a bash block; one may span lines by a backslash or an open quote."""
    found, current = [], ""
    for line in block.text.splitlines():
        current = f"{current}\n{line}" if current else line
        if current.strip() and _is_complete(current):
            found.append(current)
            current = ""
    assert not current.strip(), f"{block.label}: not a complete command: {current}"
    return found


def _is_complete(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return not text.endswith("\\")


def transcripts(path: Path) -> Iterator[Transcript]:
    for block in blocks(path):
        if block.language == "console" or block.text.startswith("$ "):
            first, _, rest = block.text.partition("\n")
            assert first.startswith("$ "), block.label
            yield Transcript(block, first[2:], tuple(rest.rstrip("\n").splitlines()))


def inline_commands(path: Path) -> list[str]:
    """Every `mooncake-v0 …` between backticks in the prose and the tables."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return [re.sub(r"\s+", " ", match) for match in re.findall(r"`(mooncake-v0 [^`]+)`", text)]


def first_json(path: Path) -> str:
    """The first JSON block: the README's mooncake.json."""
    return next(block.text for block in blocks(path) if block.language == "json")


def matches(shown: tuple[str, ...], real: list[str]) -> bool:
    """Whether real output is what the document shows, where … stands for anything within a line."""
    return len(shown) == len(real) and all(
        re.fullmatch(re.escape(one).replace("…", ".*"), other) for one, other in zip(shown, real)
    )


def normalised(line: str) -> str:
    """A line without what differs from run to run: addresses, epochs, numbers, widths."""
    line = re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "IP", line)
    line = re.sub(r"\b[0-9a-f]{8,16}\b", "EPOCH", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "N", line)).strip()
