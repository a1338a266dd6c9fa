"""Numbers in text that somebody else wrote."""

from __future__ import annotations

MOST = 9


def number(text: str | None) -> int | None:
    """What one to nine ASCII digits say; None for any other text.

    int() would take signs, blanks, underscores and other scripts' digits, and raises for thousands of digits.
    """
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) <= MOST else None


def port_number(text: str | None) -> int | None:
    """A TCP port, 1 to 65535, in at most five digits; None for any other text."""
    port = number(text) if text and len(text) <= 5 else None
    return port if port is not None and 1 <= port <= 65535 else None
