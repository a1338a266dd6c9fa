"""YAML with line numbers, by PyYAML's safe loader. Used by the compose and Kubernetes readers."""

from __future__ import annotations

from typing import Any

import yaml


class _Lines(yaml.SafeLoader):
    """SafeLoader that remembers on which line each mapping and sequence starts."""

    lines: dict[int, int]


def _mapping(loader: _Lines, node: yaml.MappingNode) -> Any:
    loader.flatten_mapping(node)
    data: dict[Any, Any] = {}
    yield data
    data.update(loader.construct_mapping(node, deep=False))
    loader.lines[id(data)] = node.start_mark.line + 1


_Lines.add_constructor("tag:yaml.org,2002:map", _mapping)


def load_all(text: str) -> tuple[list[Any], dict[int, int]]:
    """Documents of a YAML text, and the line of each mapping by its id; yaml.YAMLError for what is not YAML."""
    loader = _Lines(text)
    loader.lines = {}
    documents = []
    try:
        while loader.check_data():  # type: ignore[no-untyped-call]
            documents.append(loader.get_data())
    except (RecursionError, ValueError, TypeError, AttributeError) as error:
        # values that no constructor takes, such as the date 2024-99-99, or an unhashable key
        raise yaml.YAMLError(str(error)) from error
    finally:
        loader.dispose()
    return documents, loader.lines


def text_of(value: Any) -> str:
    """A scalar as it would be written: true for True, empty for nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
