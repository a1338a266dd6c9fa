"""Reads systemd units: Environment, EnvironmentFile, ExecStart, continuations, specifiers. Called by `files`."""

from __future__ import annotations

import re
from typing import Mapping

from mooncake_v0.migrate.commands import Nested, Scene, read_command
from mooncake_v0.migrate.docker import split_words
from mooncake_v0.migrate.env_files import parse_env_file
from mooncake_v0.migrate.records import Found, Lookup, Place, Shape

Entry = tuple[str, str, str, int]


def is_unit(text: str) -> bool:
    return re.search(r"^\[Service\]\s*$", text, re.MULTILINE) is not None


def parse_unit(text: str) -> list[Entry]:
    """(section, key, value, line) in order; continued lines are joined, comments dropped."""
    entries: list[Entry] = []
    section, pending, first = "", "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith(("#", ";")) or (not stripped and not pending):
            continue
        pending, first = pending + stripped, first or number
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip() + " "
            continue
        if re.fullmatch(r"\[[^\]]+\]", pending):
            section = pending[1:-1]
        elif "=" in pending:
            key, _, value = pending.partition("=")
            entries.append((section, key.strip(), value.strip(), first))
        pending, first = "", 0
    return entries


def read_unit(text: str, file: str, found: Found, lookup: Lookup, nested: Nested) -> None:
    entries = parse_unit(text)
    environment: dict[str, str] = {}
    for section, key, value, line in entries:
        if section == "Service" and key == "Environment":
            environment.update(_assignments(value))
        elif section == "Service" and key == "EnvironmentFile":
            path = value.lstrip("-")
            found_file = lookup(path)
            if found_file is None:
                found.note(
                    Place(file, line), value, "the env file is not among the given paths; its variables are not known"
                )
            else:
                environment.update(parse_env_file(found_file.text))
    name = file.rpartition("/")[2]
    instance = name.partition("@")[2].rpartition(".")[0] if "@" in name else ""
    for section, key, value, line in entries:
        if section == "Service" and key == "ExecStart" and value:
            scene = Scene(shape=Shape("systemd", entries), name=name, environment=tuple(environment.items()))
            words = _words(value.lstrip("@-:+!"), environment, instance)
            read_command(words, list(environment.items()), Place(file, line), found, scene, nested)


def _assignments(value: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in split_words(value) if "=" in word)


def _words(value: str, environment: Mapping[str, str], instance: str) -> list[str]:
    """Words of ExecStart: `${NAME}` inside a word, `$NAME` as a word of its own (which splits), %i, %%."""
    words: list[str] = []
    for word in split_words(value):
        word = re.sub(
            r"%(.)", lambda m: {"i": instance or "${INSTANCE}", "I": instance, "%": "%"}.get(m[1], m[0]), word
        )
        bare = re.fullmatch(r"\$([A-Za-z_][A-Za-z0-9_]*)", word)
        if bare and bare[1] in environment:
            words += environment[bare[1]].split()
            continue
        word = re.sub(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", lambda m: environment.get(m[1], m[0]), word)
        words.append(word.replace("$$", "$"))
    return words
