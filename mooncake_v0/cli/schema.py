"""`mooncake-v0 schema`: the JSON Schema of a mooncake.json, for editors and other checkers."""

from __future__ import annotations

import click

HELP = """Print the JSON Schema (draft 2020-12) of mooncake.json.

An editor that knows the schema completes and explains the fields.

\b
Examples:
  mooncake-v0 schema > mooncake.schema.json
  then write "$schema": "./mooncake.schema.json" into mooncake.json
"""


@click.command(help=HELP)
def schema() -> int:
    from mooncake_v0.config.schema import schema_text

    click.echo(schema_text(), nl=False)
    return 0
