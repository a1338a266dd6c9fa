"""JSON as the json module reads and writes it, several times as fast.

`metadata ls` has tens of thousands of values, and while the proxy reads a prompt of as many token ids it passes on nobody's
answer. msgspec reads what RFC 8259 calls JSON. The few texts that json.loads takes besides (NaN, a byte order mark, UTF-16,
half a surrogate pair) go to json.loads, so that both give the same.
"""

from __future__ import annotations

import json
from typing import Any, Callable

import msgspec

_decode = msgspec.json.Decoder().decode


def loads(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, RecursionError for one that is nested too deeply."""
    return loads_to_rewrite(text)[0]


def loads_to_rewrite(text: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """As `loads`, and what writes the value, or parts of it, such that they are read again as what they are."""
    try:
        return _decode(text), msgspec.json.encode
    except msgspec.DecodeError:
        return json.loads(text), _dumps  # msgspec would write null for NaN, and no half of a surrogate pair


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def dumps_indented(value: Any) -> str:
    """As json.dumps with an indent of 2, for which json has no fast way."""
    text = json.dumps(value)
    try:
        return msgspec.json.format(text, indent=2)
    except msgspec.DecodeError:
        return json.dumps(value, indent=2)
