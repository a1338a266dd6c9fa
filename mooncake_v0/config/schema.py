"""The shipped JSON Schema: its text for `mooncake-v0 schema`, and its violations for the shape rules."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from mooncake_v0.config.rules.registry import ShapeError

SCHEMA_FILE = Path(__file__).with_name("schema.json")


def schema_text() -> str:
    return SCHEMA_FILE.read_text(encoding="utf-8")


@cache
def schema() -> dict[str, Any]:
    """The schema, draft 2020-12."""
    loaded: dict[str, Any] = json.loads(schema_text())
    return loaded


def shape_errors(value: Any) -> tuple[ShapeError, ...]:
    """Missing fields, unknown fields and wrong types of a parsed mooncake.json, by the schema.

    A file with the right fields, all of them texts, has none, and that is known without the jsonschema library, whose
    import takes longer than all the rest of a check.
    """
    if not isinstance(value, dict) or _is_plainly_right(value):
        return ()
    from jsonschema import Draft202012Validator

    errors: dict[ShapeError, None] = {}  # jsonschema reports each missing field by itself, in one order
    for error in Draft202012Validator(schema()).iter_errors(value):
        path = tuple(error.absolute_path)
        if error.validator == "required":
            names = [name for name in error.validator_value if name not in error.instance]
            errors.update((ShapeError("required", path, name), None) for name in names)
        elif error.validator == "additionalProperties":
            names = [name for name in value if name not in schema()["properties"]]
            errors.update((ShapeError("additionalProperties", (*path, name)), None) for name in names)
        elif error.validator == "type":
            errors[ShapeError("type", path)] = None
    return tuple(errors)


def _is_plainly_right(value: dict[str, Any]) -> bool:
    return (
        all(name in value for name in schema()["required"])
        and all(name in schema()["properties"] for name in value)
        and all(isinstance(item, str) for item in value.values())
    )
