"""Writes the generated references: docs/commands.md from the help texts, docs/configuration.md from the JSON Schema,
docs/findings.md from the rules. `python -m tests.reference` after a change; tests/test_docs.py compares.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Iterator

import click

from mooncake_v0.cli import cli
from mooncake_v0.cli.explain import explanations
from mooncake_v0.config.schema import SCHEMA_FILE

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 80  # click leaves two columns free


def commands() -> Iterator[tuple[str, click.Command]]:
    """("mooncake-v0 metadata ls", its command) for every command, groups before what is in them."""
    yield from _walk("mooncake-v0", cli)


def _walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _walk(f"{path} {name}", found)


def help_text(path: str, command: click.Command) -> str:
    """What `--help` prints on a terminal of 80 columns."""
    command = copy.copy(command)
    command._help_option = None  # click keeps the first one made: without -h, where a test called the command by itself
    context = click.Context(command, info_name=path, terminal_width=WIDTH - 2)
    context.help_option_names = ["-h", "--help"]
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines()) + "\n"


def commands_page() -> str:
    parts = ["# Commands\n\nWhat `--help` of each command prints. This page is generated.\n"]
    parts += [f"## {path}\n\n```text\n{help_text(path, command)}```\n" for path, command in commands()]
    return "\n".join(parts)


def configuration_page() -> str:
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    parts = [f"# {schema['title']}\n\n{schema['description']} This page is generated from the schema.\n"]
    for name, field in schema["properties"].items():
        needed = "required" if name in schema["required"] else f"default: {json.dumps(field.get('default', 'none'))}"
        examples = ", ".join(f"`{json.dumps(value)}`" for value in field.get("examples", []))
        parts.append(f"## {name}\n\n{field['title']} ({needed}). {field['description']}\n\nExamples: {examples}\n")
    for example in schema["examples"]:
        parts.append(f"```json\n{json.dumps(example, indent=2)}\n```\n")
    return "\n".join(parts)


def findings_page() -> str:
    # sorted: the order of registration depends on what was imported first
    found = sorted(explanations().values(), key=lambda item: (item.group, item.name))
    count = f"{len(found)} names"
    parts = [
        f"# Findings\n\n{count}, as `mooncake-v0 explain NAME` prints them. This page is generated from the rules.\n"
    ]
    for group in dict.fromkeys(item.group for item in found):
        parts.append(f"## {group}\n")
        for item in found:
            if item.group == group:
                parts.append(f"### {item.name}\n\n{item.severity}. {item.text.strip()}\n")
    return "\n".join(parts)


PAGES = {"commands.md": commands_page, "configuration.md": configuration_page, "findings.md": findings_page}


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
