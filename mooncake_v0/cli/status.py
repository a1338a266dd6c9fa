"""`mooncake-v0 status`: both sides of a pair as their transfer agents see it now. Asks over the side channel, waits for
no agent longer than the timeout, and changes nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mooncake_v0.at_once import at_once
from mooncake_v0.errors import AgentUnavailableError, CouldNotCheckError

if TYPE_CHECKING:
    from mooncake_v0.config.model import MooncakeConfig, Role
    from mooncake_v0.transfer.messages import Status

HELP = """Show what the transfer agents of both sides say, live.

One line for each rank: its engine and peer, how full its buffer is, the
share of prompts that decode took over (HITS), and the speed of its reads
("mapped" where it uses prefill's buffer in place, on the same host).
Exit code: 0 all agents answer and are connected, 1 not, 2 could not check.

\b
Examples:
  mooncake-v0 status mooncake.json
  mooncake-v0 status mooncake.json --tp 4 --format json

Without FILE the file in MOONCAKE_CONFIG_PATH is used.
"""
COLUMNS = ("SIDE", "RANK", "SIDE CHANNEL", "EPOCH", "ENGINE", "BUFFER", "ENTRIES", "HITS", "READ", "PEER OR LAST ERROR")


@dataclass(frozen=True)
class AgentRow:
    """One agent. hit_rate: of decode's prompts, 0..1; read_gb_per_s: over all its reads; None where it has none.

    transport: how entries come to decode: engine, or shm where it maps prefill's buffer on the same host
    problem: why this rank transfers nothing now; empty if it does.
    """

    side: str
    rank: int
    address: str
    problem: str
    engine: str = ""
    peer: str = ""
    epoch: str = ""
    buffer_bytes: int = 0
    buffer_limit_bytes: int = 0
    entries: int = 0
    hit_rate: float | None = None
    read_gb_per_s: float | None = None
    transport: str = ""
    counters: dict[str, float] = field(default_factory=dict)


@click.command(help=HELP)
@click.argument("file", envvar="MOONCAKE_CONFIG_PATH", metavar="[FILE]")
@click.option(
    "--tp", "ranks", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N", help="Tensor parallel size."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 60),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds to wait for an agent.",
)
@click.option(
    "--secret-file",
    envvar="MOONCAKE_V0_SECRET_FILE",
    metavar="PATH",
    help="The shared secret; also from $MOONCAKE_V0_SECRET_FILE.",
)
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def status(file: str, ranks: int, timeout_s: float, secret_file: str | None, output: str) -> int:
    from mooncake_v0.cli.waiting import waiting_for
    from mooncake_v0.config.load import load_config

    config = load_config(file, tensor_parallel_size=ranks)
    with waiting_for("the agents"):
        rows = ask_all(config, ranks, timeout_s, read_secret(secret_file))
    healthy = not any(row.problem for row in rows)
    if output == "json":
        click.echo(json.dumps({"healthy": healthy, "agents": [asdict(row) for row in rows]}, indent=2))
    else:
        _print(rows, healthy)
    return 0 if healthy else 1


def read_secret(path: str | None) -> bytes | None:
    """The shared secret as the agents read it; None without one."""
    if path is None:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise CouldNotCheckError(
            f"the secret file {path} cannot be read: {error.strerror}", fix="run as the user that runs vLLM"
        ) from error


def ask_all(config: MooncakeConfig, ranks: int, timeout_s: float, secret: bytes | None) -> list[AgentRow]:
    """Every rank of both sides, asked at once: the whole takes one timeout."""
    from mooncake_v0.config.model import ROLES

    asked = [(side, rank) for side in ROLES for rank in range(ranks)]
    return at_once(lambda one: _ask(config, one[0], one[1], timeout_s, secret), asked)


def _ask(config: MooncakeConfig, side: Role, rank: int, timeout_s: float, secret: bytes | None) -> AgentRow:
    from mooncake_v0.transfer.status import query_status

    ports = config.ports(side, rank)
    address = f"{ports.host}:{ports.side_channel}"
    try:
        return make_row(
            side, rank, address, query_status(ports.host, ports.side_channel, timeout_s=timeout_s, secret=secret)
        )
    except AgentUnavailableError as error:
        return AgentRow(side, rank, address, error.what)


def make_row(side: Role, rank: int, address: str, found: Status) -> AgentRow:
    """What one answer means."""
    counters = found.counters
    hits = counters.get("hits", 0.0)
    lookups = hits + sum(value for name, value in counters.items() if name.startswith("miss_"))
    read_s = counters.get("read_us", 0.0) / 1e6
    return AgentRow(
        side,
        rank,
        address,
        _problem(side, rank, found),
        found.engine,
        found.peer,
        found.epoch,
        found.buffer_bytes,
        found.buffer_limit_bytes,
        found.entries,
        hits / lookups if lookups else None,
        counters.get("read_bytes", 0.0) / read_s / 1e9 if read_s else None,
        found.transport,
        counters,
    )


def _problem(side: Role, rank: int, found: Status) -> str:
    if (found.role, found.rank) != (side, rank):
        return f"{found.role} rank {found.rank} answers here, not {side} rank {rank}"
    if found.engine != "ready":
        return f"engine: {found.engine}"
    return "" if found.peer_epoch else f"peer: {found.peer}"


def _print(rows: list[AgentRow], healthy: bool) -> None:
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS) - 1)]
    for line in cells:
        click.echo("  ".join([*(text.ljust(width) for text, width in zip(line, widths)), line[-1]]))
    word = click.style("connected", fg="green") if healthy else click.style("not connected", fg="red")
    click.echo(f"the pair is {word}")


def _cells(row: AgentRow) -> tuple[str, ...]:
    has_answer = bool(row.epoch)
    return (
        row.side,
        str(row.rank),
        row.address,
        row.epoch[:8] or "-",
        ("ready" if row.engine == "ready" else "failed") if has_answer else "-",
        f"{100 * row.buffer_bytes / row.buffer_limit_bytes:.0f} %" if row.buffer_limit_bytes else "-",
        str(row.entries) if has_answer else "-",
        "-" if row.hit_rate is None else f"{100 * row.hit_rate:.0f} %",
        _read(row),
        row.problem or "; ".join(filter(None, (row.peer, _misses(row)))),
    )


def _read(row: AgentRow) -> str:
    """How fast entries come to decode; mapped: they are used in prefill's pool, on the same host."""
    if row.transport == "shm":
        return "mapped"
    return "-" if row.read_gb_per_s is None else f"{row.read_gb_per_s:.2f} GB/s"


def _misses(row: AgentRow) -> str:
    """Why decode computed prompts itself, as far as it did."""
    prefix = "miss_"
    found = [f"{name[len(prefix) :]} {count:.0f}" for name, count in row.counters.items() if name.startswith(prefix)]
    return f"missed: {', '.join(found)}" if found else ""
