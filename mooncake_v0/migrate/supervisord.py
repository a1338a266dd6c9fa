"""Reads supervisord configuration: [program:x] sections with command and environment. Called by `files`."""

from __future__ import annotations

import configparser
import re

from mooncake_v0.migrate.commands import Nested, Scene, read_command
from mooncake_v0.migrate.docker import split_words
from mooncake_v0.migrate.records import Found, Place, Shape


def is_supervisord(text: str) -> bool:
    return re.search(r"^\[program:[^\]]+\]", text, re.MULTILINE) is not None


def read_supervisord(text: str, file: str, found: Found, nested: Nested) -> None:
    parser = configparser.RawConfigParser(
        inline_comment_prefixes=(" ;",), strict=False, delimiters=("=", ":"), empty_lines_in_values=False
    )
    try:
        parser.read_string(text)
    except configparser.Error as error:
        found.note(Place(file), str(error), "not a supervisord configuration")
        return
    common = parser["supervisord"].get("environment", "") if parser.has_section("supervisord") else ""
    for section in parser.sections():
        if not section.startswith("program:") or not parser[section].get("command"):
            continue
        options = dict(parser[section])
        name = section.partition(":")[2]
        environment = [*_environment(common), *_environment(options.get("environment", ""))]
        command = _expanded(options["command"], name, dict(environment))
        # a continued value keeps its line breaks, and people add backslashes as in a shell
        words = split_words(re.sub(r"\\?\n", " ", command))
        scene = Scene(shape=Shape("supervisord", {"section": section, "options": options}), name=name)
        scene = Scene(**{**scene.__dict__, "environment": tuple(environment)})
        if words:
            read_command(words, environment, Place(file, _line(text, section)), found, scene, nested)


def _expanded(command: str, name: str, environment: dict[str, str]) -> str:
    text = re.sub(r"%\(ENV_(\w+)\)s", lambda match: environment.get(match[1], f"${{{match[1]}}}"), command)
    return text.replace("%(program_name)s", name).replace("%%", "%")


def _environment(value: str) -> list[tuple[str, str]]:
    """KEY="value",KEY2=value2, also over several lines."""
    pairs = re.findall(r"""([A-Za-z_][A-Za-z0-9_]*)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^,\s]*)""", value)
    return [(name, text[1:-1] if text[:1] in "'\"" and len(text) > 1 else text) for name, text in pairs]


def _line(text: str, section: str) -> int:
    lines = [line.strip() for line in text.splitlines()]
    return lines.index(f"[{section}]") + 1 if f"[{section}]" in lines else 0
