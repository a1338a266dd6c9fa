"""`mooncake-v0 ports`: every port of a pair, who connects to it, and the firewall rules for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mooncake_v0.config.port_table import Opening, PortUse

HELP = """Show every port of a pair, and the firewall rules that it needs.

One row for each port that a rank binds: rank r of a side uses base + 2r
(engine handshake), base + 2r + 1 (engine data) and base + 32 + r (side
channel), base being the port in prefill_url or decode_url.

\b
Examples:
  mooncake-v0 ports mooncake.json
  mooncake-v0 ports mooncake.json --tp 4 --prefill-api-port 8100
  mooncake-v0 ports mooncake.json --firewall ufw
  mooncake-v0 ports mooncake.json --format json
"""


@click.command(help=HELP)
@click.argument("file", metavar="FILE")
@click.option(
    "--tp", "ranks", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N", help="Tensor parallel size."
)
@click.option("--prefill-api-port", type=click.IntRange(1, 65535), metavar="P", help="Also list prefill's API port.")
@click.option("--decode-api-port", type=click.IntRange(1, 65535), metavar="P", help="Also list decode's API port.")
@click.option(
    "--firewall", type=click.Choice(["firewalld", "ufw", "iptables"]), help="Print the rules of this firewall only."
)
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def ports(
    file: str, ranks: int, prefill_api_port: int | None, decode_api_port: int | None, firewall: str | None, output: str
) -> int:
    from mooncake_v0.config import port_table
    from mooncake_v0.config.load import load_config
    from mooncake_v0.config.model import Role

    config = load_config(file, tensor_parallel_size=ranks)
    given: tuple[tuple[Role, int | None], ...] = (("prefill", prefill_api_port), ("decode", decode_api_port))
    table = port_table.port_table(config, ranks, {role: port for role, port in given if port is not None})
    openings = port_table.openings(config, ranks)
    rules = {
        name: [line for opening in openings for line in getattr(port_table, name)(opening)]
        for name in ("firewalld", "ufw", "iptables")
    }
    if output == "json":
        click.echo(json.dumps({"ports": [row.as_dict() for row in table], "firewall": rules}, indent=2))
    elif firewall is not None:
        click.echo("\n".join(rules[firewall] or [f"# prefill and decode are one machine: {firewall} needs no rule"]))
    else:
        _print_table(table)
        _print_rules(openings, rules)
    return 0


def _print_table(table: list[PortUse]) -> None:
    rows = [("SIDE", "HOST", "RANK", "PORT", "USE", "PROTOCOL", "CONNECTED BY")]
    for item in table:
        rank = "-" if item.rank is None else str(item.rank)
        rows.append((item.side, item.host, rank, str(item.port), item.use, item.protocol, item.connects))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _print_rules(openings: list[Opening], rules: dict[str, list[str]]) -> None:
    if not openings:
        click.echo("\nPrefill and decode are one machine: its firewall needs no rule for them.")
        return
    opening = openings[0]
    click.echo(f"\nOn {opening.host} (prefill), let {opening.source} (decode) in, and nobody else: whoever reaches an")
    click.echo("engine's data port can read and write the memory of its transfer agent.")
    for name, lines in rules.items():
        click.echo(f"\n{name}:")
        for line in lines:
            click.echo(f"  {line}")
