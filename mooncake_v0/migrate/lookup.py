"""Finds the file that a command or another file names, among the files that were given. Called by `files`, `deployment`."""

from __future__ import annotations

from typing import Sequence

from mooncake_v0.migrate.records import TextFile


def find_file(
    files: Sequence[TextFile], written: str, beside: str, mounts: Sequence[tuple[str, str]] = ()
) -> TextFile | None:
    """The file that a command names: through its mounts, by path, beside the file that names it, or by unique name."""
    known = {file.path: file for file in files}
    folder = beside.rpartition("/")[0]
    for candidate in [*_through_mounts(written, mounts), written]:
        plain = candidate[2:] if candidate.startswith("./") else candidate
        for path in (plain, f"{folder}/{plain}" if folder else plain):
            if path in known:
                return known[path]
    name = [*_through_mounts(written, mounts), written][0].rpartition("/")[2]
    named = [file for file in files if file.path.rpartition("/")[2] == name]
    return named[0] if len(named) == 1 else None


def _through_mounts(path: str, mounts: Sequence[tuple[str, str]]) -> list[str]:
    for target, source in mounts:
        if path == target and source:
            return [source]
        if source and path.startswith(target.rstrip("/") + "/"):
            return [source.rstrip("/") + "/" + path[len(target.rstrip("/")) + 1 :]]
    return []
