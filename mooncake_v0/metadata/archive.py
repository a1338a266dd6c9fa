"""Export and import of a store's keys: one JSON object a line, the first one saying what the file is."""

from __future__ import annotations

import json
from typing import Iterable, Iterator

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata.http_store import entry_row, row_value
from mooncake_v0.metadata.store import Entry

FORMAT = "mooncake-v0-metadata"
VERSION = 1


def export_lines(entries: Iterable[Entry]) -> Iterator[str]:
    """The lines of an export, without line ends."""
    yield json.dumps({"format": FORMAT, "version": VERSION})
    for entry in entries:
        yield json.dumps(entry_row(entry))


def read_export(lines: Iterable[str], where: str) -> list[Entry]:
    """The entries of an export; the whole file is checked before the first one is returned.

    Raises MetadataError with file and line number.
    """
    entries: list[Entry] = []
    number = 0
    for number, line in enumerate(lines, 1):
        row = _object(line, f"{where}:{number}")
        if number == 1:
            if row.get("format") != FORMAT or row.get("version") != VERSION:
                raise MetadataError(
                    f"{where} is not an export of this package", fix="make one with `mooncake-v0 metadata export`"
                )
            continue
        entries.append(_entry(row, f"{where}:{number}"))
    if number == 0:
        raise MetadataError(f"{where} is empty", fix="make an export with `mooncake-v0 metadata export`")
    return entries


def _object(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise MetadataError(f"{where}: not JSON: {error}", fix="export again; this file is damaged") from error
    if not isinstance(row, dict):
        raise MetadataError(f"{where}: not a JSON object", fix="export again; this file is damaged")
    return row


def _entry(row: dict[str, object], where: str) -> Entry:
    key = row.get("key")
    try:
        value = row_value(row)
    except ValueError as error:
        raise MetadataError(f"{where}: value_base64 is not base64", fix="export again; this file is damaged") from error
    if not isinstance(key, str) or not key or value is None:
        raise MetadataError(f"{where}: no key or no value", fix="export again; this file is damaged")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise MetadataError(f"{where}: the key is not text", fix="export again; this file is damaged") from error
    return Entry(key, value)
