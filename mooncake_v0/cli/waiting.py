"""Tells a user at a terminal what a command waits for; says nothing into a pipe or a file."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Iterator


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """A spinner with these words on standard error, while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"waiting for {what}"):
        yield
