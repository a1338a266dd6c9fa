"""Server-sent events as far as a relay must know them: where one ends. No parsing of what is in them."""

from __future__ import annotations

HELD_LIMIT_BYTES = 1024 * 1024
END_MARKER = b"[DONE]"


class EventFramer:
    """Passes on whole events and holds back the beginning of one that has not ended yet.

    A client cannot use half an event, so nothing is lost by waiting for its end; and when the stream breaks, what
    follows begins on an event boundary. The bytes that come out are, in order, exactly the bytes that went in.
    """

    def __init__(self) -> None:
        self._held = b""
        self.ended = False  # the end marker has passed

    def feed(self, data: bytes) -> bytes:
        """Bytes up to the last event boundary; what is after it stays. A giant without one passes through."""
        data = self._held + data if self._held else data
        # vLLM ends its events with "\n\n"; "\r\n\r\n" is the other form in use
        end = max(_end_of(data, b"\n\n"), _end_of(data, b"\r\n\r\n"))
        if end == 0 and len(data) > HELD_LIMIT_BYTES:
            end = len(data)
        passed, self._held = data[:end], data[end:]
        if END_MARKER in passed[-64:]:
            self.ended = True
        return passed

    def rest(self) -> bytes:
        """What is held when the stream ends in good order."""
        held, self._held = self._held, b""
        return held


def _end_of(data: bytes, boundary: bytes) -> int:
    """The index after the last boundary, 0 when there is none."""
    at = data.rfind(boundary)
    return at + len(boundary) if at >= 0 else 0
