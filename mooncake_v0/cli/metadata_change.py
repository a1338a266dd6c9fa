"""`metadata put`, `rm`, `prune` and `import`: they change the store, and say what they changed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from mooncake_v0.cli.metadata_source import KEY, format_option, opened, source_argument, token_option

if TYPE_CHECKING:
    from mooncake_v0.metadata.prune import Candidate


@click.command()
@click.argument("source")
@click.argument("key", type=KEY)
@click.argument("value", required=False)
@click.option("--ttl", "ttl_s", type=click.FloatRange(min=1), metavar="S", help="The key vanishes after S seconds.")
@token_option
def put(source: str, key: str, value: str | None, ttl_s: float | None, token_file: str | None) -> None:
    """Write a key, over an existing one too; VALUE from standard input when left out.

    \b
    Example:
      mooncake-v0 metadata put http://127.0.0.1:8080/metadata note '{"by": "me"}'
    """
    data = sys.stdin.buffer.read() if value is None else value.encode()
    with opened(source, token_file) as store:
        store.put(key, data, ttl_s=ttl_s)


@click.command()
@click.argument("source")
@click.argument("keys", nargs=-1, required=True, type=KEY)
@token_option
def rm(source: str, keys: tuple[str, ...], token_file: str | None) -> None:
    """Remove keys, alive or not; exit code 1 when one did not exist.

    \b
    Example:
      mooncake-v0 metadata rm mooncake.json mooncake/ram/10.0.0.7:13003
    """
    missing = []
    with opened(source, token_file) as store:
        for key in keys:
            if not store.delete(key):
                missing.append(key)
    for key in missing:
        click.echo(f"no key {key!r}", err=True)
    sys.exit(1 if missing else 0)


@click.command()
@source_argument
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--assume-local", is_flag=True, help="Loopback addresses in the store are this host's.")
@click.option(
    "--unreachable-after",
    "unreachable_after_s",
    type=click.FloatRange(min=60),
    metavar="S",
    help="Also remove segments whose host does not answer at all and whose agent was last seen S seconds ago.",
)
@token_option
@format_option
def prune(
    source: str,
    dry_run: bool,
    yes: bool,
    assume_local: bool,
    unreachable_after_s: float | None,
    token_file: str | None,
    output: str,
) -> None:
    """Remove the keys of segments whose process is provably gone.

    A segment is removed when nobody listens on its port, twice, a second apart, and its
    values have not changed meanwhile. What is unsure stays. Keys of other applications
    are never touched.

    \b
    Examples:
      mooncake-v0 metadata prune mooncake.json --dry-run
      mooncake-v0 metadata prune etcd://10.0.0.9:2379 --yes
    """
    from mooncake_v0.metadata.liveness import Judge
    from mooncake_v0.metadata.prune import find_candidates, remove

    with opened(source, token_file) as store:
        candidates = find_candidates(store, Judge(assume_local, unreachable_after_s))
        if output == "text":
            _print_candidates(candidates)
        is_asked = bool(candidates) and not dry_run and not yes
        if is_asked and not click.confirm(f"remove the keys of {len(candidates)} dead segments?", err=True):
            click.echo("nothing removed", err=True)
            sys.exit(1)
        removed = [] if dry_run else [key for candidate in candidates for key in remove(store, candidate)]
    if output == "json":
        rows = [{"name": c.segment.name, "why": c.liveness.reason} for c in candidates]
        click.echo(json.dumps({"stale": rows, "removed_keys": removed, "dry_run": dry_run}, indent=2))
    elif candidates and not dry_run:
        click.echo(f"removed {len(removed)} keys")


def _print_candidates(candidates: list[Candidate]) -> None:
    if not candidates:
        click.echo("nothing to remove")
    for candidate in candidates:
        click.echo(f"{candidate.segment.name!r}: {candidate.liveness.reason}")
        for entry in candidate.segment.entries:
            click.echo(f"  {entry.key!r}")


@click.command("import")
@click.argument("source")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@click.option("--overwrite", is_flag=True, help="Replace keys that exist; without it they are left as they are.")
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@token_option
def import_command(source: str, file: Any, overwrite: bool, dry_run: bool, token_file: str | None) -> None:
    """Write the keys of an export into a store; - reads standard input.

    \b
    Example:
      mooncake-v0 metadata import etcd://10.0.0.9:2379 before.jsonl
    """
    from mooncake_v0.metadata.archive import read_export

    entries = read_export(file, getattr(file, "name", "-"))
    written = kept = 0
    with opened(source, token_file) as store:
        for entry in entries:
            existing = store.get(entry.key)
            if existing is not None and not overwrite:
                kept += 1
                continue
            written += 1
            if not dry_run:
                store.put(entry.key, entry.value)
    click.echo(f"{'would write' if dry_run else 'wrote'} {written} keys, left {kept} as they are")
