"""What the readers hand on: process invocations, files found inside other files, and what could not be read.

A reader gets one file's text and a `Found` to fill. Every format ends in the same `Invocation` (an argument vector and
its environment), so that the same deployment written in two formats looks the same from here on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Optional


@dataclass(frozen=True)
class Place:
    """A line of an input file; line 0 means the file as a whole."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Unread:
    """Something that was not understood, or only with a guess, and what was done about it."""

    place: Place
    what: str
    why: str


@dataclass(frozen=True)
class Shape:
    """What `--emit` needs to write a file of the original's kind.

    document: the parsed original (compose service, manifest, unit sections, docker options), untouched
    """

    launcher: str
    document: Any = None


@dataclass(frozen=True)
class Invocation:
    """One process as some file starts it.

    env:     exported variables and those written before the command, in order
    mounts:  (path inside the container, source: a path, or configmap:NAME/KEY)
    ports:   (port on the host, port in the container)
    host:    where it runs, if the file says so (ssh, hostname, node name)
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    place: Place
    shape: Shape
    name: str = ""
    host: str = ""
    image: str = ""
    mounts: tuple[tuple[str, str], ...] = ()
    ports: tuple[tuple[str, str], ...] = ()
    service_links: bool = True
    launched_by_us: bool = False


@dataclass(frozen=True)
class TextFile:
    """A file of the input, or one written inside another (here document, ConfigMap)."""

    path: str
    text: str
    place: Place


# where a file that another one names is found: path as written -> the file, or None
Lookup = Callable[[str], Optional[TextFile]]


def no_lookup(path: str) -> TextFile | None:
    """The lookup of a reader that has no other files."""
    return None


@dataclass
class Found:
    """Collects what the readers find; the only mutable record, filled while reading and then left alone."""

    invocations: list[Invocation] = field(default_factory=list)
    files: list[TextFile] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    versions: list[tuple[str, str, Place]] = field(default_factory=list)
    services: list[tuple[str, Place]] = field(default_factory=list)
    # files that something named: a note that they hold nothing by themselves is not worth reading
    used: set[str] = field(default_factory=set)
    _noted: set[Unread] = field(default_factory=set, repr=False)

    def drop_repeated(self) -> None:
        """Keep the first of equal invocations and files: what all alternatives of a script have in common."""
        self.invocations[:] = [item for i, item in enumerate(self.invocations) if item not in self.invocations[:i]]
        self.files[:] = [item for i, item in enumerate(self.files) if item not in self.files[:i]]

    def note(self, place: Place, what: str, why: str) -> None:
        entry = Unread(place, " ".join(what.split())[:160], why)
        if entry not in self._noted:
            self._noted.add(entry)
            self.unread.append(entry)
