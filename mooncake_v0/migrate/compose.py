"""Reads docker-compose files: services with their commands, variables, ports and mounts. Called by `files`."""

from __future__ import annotations

import re
from typing import Any, Callable, Mapping

from mooncake_v0.migrate.commands import Nested, Scene, container_command
from mooncake_v0.migrate.docker import split_words
from mooncake_v0.migrate.document import text_of
from mooncake_v0.migrate.env_files import parse_env_file
from mooncake_v0.migrate.records import Found, Lookup, Place, Shape

_VARIABLE = re.compile(r"\$(?:\$|([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?:(:?[-?+])([^{}]*))?\})")


def is_compose(document: Any) -> bool:
    services = document.get("services") if isinstance(document, dict) else None
    return isinstance(services, dict) and any(isinstance(service, dict) for service in services.values())


def read_compose(
    document: Mapping[str, Any], lines: Mapping[int, int], file: str, found: Found, lookup: Lookup, nested: Nested
) -> None:
    """Every service becomes an invocation, if it starts something we know."""
    dotenv = lookup(".env")
    variables = dict(parse_env_file(dotenv.text)) if dotenv else {}
    top = {key: value for key, value in document.items() if key in ("networks", "volumes", "secrets", "configs")}
    for name, service in document["services"].items():
        if not isinstance(service, dict):
            found.note(Place(file), f"service {name}", "is not a mapping")
            continue
        place = Place(file, lines.get(id(service), 0))
        _service(str(name), service, top, place, found, variables, lookup, nested)


def _service(
    name: str,
    service: Mapping[str, Any],
    top: Mapping[str, Any],
    place: Place,
    found: Found,
    variables: Mapping[str, str],
    lookup: Lookup,
    nested: Nested,
) -> None:
    def interpolated(value: Any) -> str:
        return interpolate(text_of(value), variables)

    environment = _environment(service, interpolated, place, found, lookup)
    scene = Scene(
        shape=Shape("compose", {"name": name, "service": service, "top": top}),
        name=name,
        host=interpolated(service.get("hostname")),
        image=interpolated(service.get("image")),
        mounts=tuple(_mount(volume, interpolated) for volume in _items(service.get("volumes"))),
        ports=tuple(_port(port, interpolated) for port in _items(service.get("ports"))),
    )
    entrypoint = _words(service.get("entrypoint"), interpolated)
    arguments = _words(service.get("command"), interpolated)
    container_command(entrypoint, arguments, environment, place, found, scene, nested)


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Compose's `${NAME:-default}` and `$$`; a name without a value stays as `${NAME}`."""

    def one(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not name:
            return "$"
        operator, default = match[3] or "", match[4] or ""
        value = variables.get(name)
        if operator.endswith("-") and (value is None or (not value and operator == ":-")):
            return default
        if operator.endswith("+"):
            return default if value else ""
        return value if value is not None else f"${{{name}}}"

    return _VARIABLE.sub(one, text)


def _words(value: Any, interpolated: Callable[[Any], str]) -> list[str]:
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    return split_words(interpolated(value)) if value else []


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _environment(
    service: Mapping[str, Any], interpolated: Callable[[Any], str], place: Place, found: Found, lookup: Lookup
) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    files = service.get("env_file") or []
    for entry in files if isinstance(files, list) else [files]:
        path = interpolated(entry.get("path") if isinstance(entry, dict) else entry)
        file = lookup(path)
        if file is None:
            found.note(place, f"env_file: {path}", "is not among the given paths; its variables are not known")
        else:
            pairs += parse_env_file(file.text)
    environment = service.get("environment") or {}
    if isinstance(environment, dict):
        pairs += [
            (str(key), f"${{{key}}}" if value is None else interpolated(value)) for key, value in environment.items()
        ]
    else:
        for item in _items(environment):
            key, equals, value = interpolated(item).partition("=")
            pairs.append((key, value if equals else f"${{{key}}}"))
    return pairs


def _mount(volume: Any, interpolated: Callable[[Any], str]) -> tuple[str, str]:
    if isinstance(volume, dict):
        return interpolated(volume.get("target")), interpolated(volume.get("source"))
    parts = interpolated(volume).split(":")
    return (parts[1], parts[0]) if len(parts) > 1 else (parts[0], "")


def _port(port: Any, interpolated: Callable[[Any], str]) -> tuple[str, str]:
    if isinstance(port, dict):
        return interpolated(port.get("published")), interpolated(port.get("target"))
    parts = interpolated(port).partition("/")[0].split(":")
    return (parts[-2], parts[-1]) if len(parts) > 1 else ("", parts[0])
