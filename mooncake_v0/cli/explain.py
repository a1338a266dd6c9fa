"""`mooncake-v0 explain`: what a finding's name stands for.

Each part of the package with findings of its own adds one line to SOURCES: a module and a function without arguments
that returns its `Explanation` list. The modules are imported when `explain` runs.
"""

from __future__ import annotations

import importlib
import json
from typing import Iterable

import click

from mooncake_v0.config.explanations import Explanation

SOURCES: list[tuple[str, str]] = [
    ("mooncake_v0.config.explanations", "config_explanations"),
    ("mooncake_v0.doctor.explanations", "doctor_explanations"),
    ("mooncake_v0.migrate.explanations", "migration_explanations"),
]

HELP = """Explain a finding by its name, or list all names.

\b
Examples:
  mooncake-v0 explain
  mooncake-v0 explain ports-overlap
  mooncake-v0 explain --format json
"""


def explanations() -> dict[str, Explanation]:
    """All explanations by name, in the order of the sources."""
    found: dict[str, Explanation] = {}
    for module, function in SOURCES:
        listed: Iterable[Explanation] = getattr(importlib.import_module(module), function)()
        found.update((item.name, item) for item in listed)
    return found


@click.command(help=HELP)
@click.argument("rule", required=False)
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def explain(rule: str | None, output: str) -> int:
    known = explanations()
    if rule is not None and rule not in known:
        import difflib

        near = difflib.get_close_matches(rule, known, n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise click.UsageError(f"no rule is named {rule!r}{hint}; `mooncake-v0 explain` lists all")
    chosen = [known[rule]] if rule is not None else list(known.values())
    if output == "json":
        click.echo(json.dumps([item.as_dict() for item in chosen], indent=2))
    elif rule is not None:
        text = click.wrap_text(chosen[0].text, width=80, preserve_paragraphs=True)
        click.echo(f"{chosen[0].name} ({chosen[0].severity})\n\n{text}")
    else:
        _list(chosen)
    return 0


def _list(items: list[Explanation]) -> None:
    formatter = click.HelpFormatter(width=80)
    for group in dict.fromkeys(item.group for item in items):
        with formatter.section(group):
            formatter.write_dl([(item.name, item.summary) for item in items if item.group == group])
    click.echo(formatter.getvalue(), nl=False)
