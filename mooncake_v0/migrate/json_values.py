"""JSON as people really pass it: `--kv-transfer-config` values with mangled quoting, and mooncake.json files.

Used by `deployment`. The repaired reading is reported, never silent.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "″": '"'})
_BARE_PAIR = re.compile(r"""\s*["']?([A-Za-z_][\w.-]*)["']?\s*:\s*["']?([^,"'{}]*)["']?\s*(?:,|$)""")


@dataclass(frozen=True)
class Parsed:
    """A JSON object as read; repaired says in words what was wrong with it, empty if nothing was."""

    value: dict[str, Any]
    repaired: str = ""


def parse_object(text: str) -> Parsed | None:
    """A JSON object out of a command line's text, or None if nothing can be made of it."""
    text = text.strip()
    attempts = (
        (text, ""),
        (text.translate(_QUOTES), "typographic quotes instead of plain ones"),
        (text.strip("'\""), "quotes around the whole value reached vLLM"),
        (text.replace('\\"', '"').strip("'\""), "escaped quotes reached vLLM"),
        (text.translate(_QUOTES).replace("'", '"'), "single quotes inside JSON"),
        (re.sub(r",\s*([}\]])", r"\1", text), "a trailing comma"),
    )
    for attempt, repaired in attempts:
        value = _loads(attempt)
        if value is not None:
            return Parsed(value, repaired)
    return _bare(text)


def _loads(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _bare(text: str) -> Parsed | None:
    """{kv_role:kv_producer,kv_rank:0}: a shell took the quotes away."""
    match = re.fullmatch(r"\{(.*)\}", text.strip("'\" "), re.DOTALL)
    if not match or "{" in match[1]:
        return None
    pairs = _BARE_PAIR.findall(match[1])
    if not pairs:
        return None
    return Parsed(
        {key: json_scalar(value.strip()) for key, value in pairs}, "the shell took the quotes out of the JSON"
    )


def json_scalar(text: str) -> Any:
    """A number, true, false or null where the text is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def compact(value: Any) -> str:
    """JSON as on a command line: no spaces, keys in the order given; 2e9 as 2000000000."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


MOONCAKE_KEYS = frozenset(
    ["prefill_url", "decode_url", "metadata_server", "metadata_backend", "protocol", "device_name"]
)


def parse_mooncake_json(text: str) -> Parsed | None:
    """A mooncake.json: an object with at least two of its keys."""
    text = text.lstrip("\ufeff")
    stripped = re.sub(r"(?m)^\s*(?://|#).*$", "", text)
    parsed = parse_object(stripped)
    if parsed is None or len(MOONCAKE_KEYS & set(parsed.value)) < 2:
        return None
    if stripped != text and not parsed.repaired:
        return Parsed(parsed.value, "comments in a JSON file")
    return parsed
