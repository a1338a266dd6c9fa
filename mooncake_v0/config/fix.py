"""What `validate --fix` writes: only changes that are certain, each in the place of one value's characters.

Certain are: lower case for protocol, metadata_backend and the scheme; no blanks around addresses and in device lists; a
scheme before metadata_server; the explicit +100 of equal URLs. Keys are never added, dropped or moved, and every
character outside the changed values stays as it is.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mooncake_v0.config.check import Checked, check_bytes
from mooncake_v0.config.rules import CheckOptions, Edit
from mooncake_v0.config.source import Document, quote
from mooncake_v0.errors import CouldNotCheckError

MAX_ROUNDS = 20


def fixed_bytes(data: bytes, options: CheckOptions) -> bytes:
    """The text with every certain change applied; the same bytes if there is none."""
    for _ in range(MAX_ROUNDS):
        checked = check_bytes(data, options)
        edit = first_edit(checked)
        if edit is None:
            break
        data = apply(checked.document, edit).encode("utf-8")
    return data


def first_edit(checked: Checked) -> Edit | None:
    """The next certain change. None while the JSON itself has a mistake: then places are not certain."""
    if checked.document.problems:
        return None
    edits = (item.finding.edit for item in checked.found)
    return next((edit for edit in edits if edit is not None and edit.path in checked.document.spans), None)


def apply(document: Document, edit: Edit) -> str:
    """The text with one value replaced."""
    span = document.spans[edit.path]
    return document.text[: span.start] + quote(edit.value) + document.text[span.end :]


def write_with_backup(path: Path, old: bytes, new: bytes) -> Path:
    """Replace the file in one step, keeping its mode; the old bytes stay beside it. Returns the backup's path.

    Raises CouldNotCheckError if the folder is not writable; the file is then as it was.
    """
    target = Path(os.path.realpath(path))
    try:
        backup = _unused(target)
        backup.write_bytes(old)
        mode = target.stat().st_mode & 0o7777
        backup.chmod(mode)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(new)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except OSError as error:
        fix = "make its folder writable, or change the file by hand as the diff shows"
        raise CouldNotCheckError(f"{path} could not be changed: {error.strerror}", fix=fix) from error
    return backup


def _unused(target: Path) -> Path:
    """target.bak, or target.bak.1, ... : an older backup is never overwritten."""
    candidate, number = target.with_name(target.name + ".bak"), 0
    while candidate.exists():
        number += 1
        candidate = target.with_name(f"{target.name}.bak.{number}")
    return candidate
