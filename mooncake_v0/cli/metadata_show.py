"""`metadata ls`, `get`, `watch`, `check` and `export`: they read, and change nothing."""

from __future__ import annotations

import gc
import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Iterator

import click

from mooncake_v0.cli.metadata_source import KEY, format_option, opened, source_argument, token_option
from mooncake_v0.errors import INFO, StoreUnavailableError, printable

if TYPE_CHECKING:
    from mooncake_v0.metadata.liveness import Liveness
    from mooncake_v0.metadata.registry import InstanceRecord
    from mooncake_v0.metadata.segments import Segment

COLUMNS = ("NAME", "ROLE", "RANK", "PROTOCOL", "ADDRESS", "AGE", "STATE", "WHY")
RETRY_S = 1.0


@click.command()
@source_argument
@click.option("--no-probe", is_flag=True, help="Do not connect to the engines' ports.")
@token_option
@format_option
def ls(source: str, no_probe: bool, token_file: str | None, output: str) -> None:
    """List the segments: who is registered, and who still lives.

    A segment is alive when its port answers, stale when nobody listens there any more,
    and unsure where neither is certain; the last column says why.

    \b
    Examples:
      mooncake-v0 metadata ls mooncake.json
      mooncake-v0 metadata ls redis://10.0.0.9:6379/1 --format json
    """
    from mooncake_v0.fast_json import dumps_indented
    from mooncake_v0.metadata.liveness import UNSURE, Liveness, judge_segments
    from mooncake_v0.metadata.prune import read_segments

    with _uncollected():
        with opened(source, token_file) as store:
            segments = read_segments(store)
        unasked = Liveness(UNSURE, "not probed")
        verdicts = {s.name: unasked for s in segments} if no_probe else judge_segments(segments)
        if output == "json":
            click.echo(dumps_indented({"segments": [_row(s, verdicts[s.name]) for s in segments]}))
        elif not segments:
            click.echo("no segments")
        else:
            click.echo(_table(segments, verdicts))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector: of thousands of segments it finds nothing, in a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _row(segment: Segment, liveness: Liveness) -> dict[str, Any]:
    record = segment.record
    return {
        "name": segment.name,
        "role": record and record.role,
        "rank": record and record.rank,
        "protocol": segment.protocol,
        "address": f"{segment.host}:{segment.handshake_port}" if segment.host else None,
        "hostname": record and record.hostname,
        "pid": record and record.pid,
        "epoch": record and record.epoch,
        "deployment": record and record.deployment,
        "api_url": record and record.api_url,
        "buffers": len(segment.buffers),
        "published_at": segment.published_at,
        "age_s": None if record is None else _age_s(record),
        "state": liveness.status,
        "why": liveness.reason,
        "keys": [entry.key for entry in segment.entries],
    }


def _table(segments: list[Segment], verdicts: dict[str, Liveness]) -> str:
    rows = [COLUMNS, *(_cells(segment, verdicts[segment.name]) for segment in segments)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    colours = {"alive": "green", "stale": "red", "unsure": "yellow"}
    states = {text: click.style(text.ljust(widths[6]), fg=colours.get(text)) for text in {row[6] for row in rows}}
    line = "  ".join(f"{{:<{width}}}" for width in widths[:6]).format
    return "\n".join(f"{line(*row[:6])}  {states[row[6]]}  {row[7]}" for row in rows)


def _cells(segment: Segment, liveness: Liveness) -> tuple[str, ...]:
    """The texts of one line, as COLUMNS names them."""
    record, host = segment.record, segment.host
    values = (
        segment.name,
        record and record.role,
        record and record.rank,
        segment.protocol,
        f"{host}:{segment.handshake_port}" if host else None,
        None if record is None else _age(_age_s(record)),
        liveness.status,
        liveness.reason,
    )
    return tuple("-" if value is None else printable(str(value)) for value in values)


def _age_s(record: InstanceRecord) -> float:
    return round(max(0.0, time.time() - record.refreshed_at), 1)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


@click.command()
@click.argument("source")
@click.argument("key", type=KEY)
@token_option
def get(source: str, key: str, token_file: str | None) -> None:
    """Print the value of a key; exit code 1 when there is none.

    \b
    Example:
      mooncake-v0 metadata get mooncake.json mooncake/ram/10.0.0.7:13003
    """
    with opened(source, token_file) as store:
        value = store.get(key)
    if value is None:
        click.echo(f"no key {key!r}", err=True)
        sys.exit(1)
    click.echo(value, nl=sys.stdout.isatty() and not value.endswith(b"\n"))


@click.command()
@source_argument
@click.option("--prefix", type=KEY, default="mooncake", show_default=True, help="Show changes of keys that begin so.")
@click.option("--for", "duration_s", type=click.FloatRange(min=0), metavar="S", help="End after S seconds.")
@token_option
@format_option
def watch(source: str, prefix: str, duration_s: float | None, token_file: str | None, output: str) -> None:
    """Print changes as they happen, until Ctrl-C.

    \b
    Example:
      mooncake-v0 metadata watch etcd://10.0.0.9:2379 --format json
    """
    deadline = None if duration_s is None else time.monotonic() + duration_s
    with opened(source, token_file) as store:
        changes = store.watch(prefix)
        while deadline is None or time.monotonic() < deadline:
            left_s = RETRY_S if deadline is None else min(RETRY_S, max(0.0, deadline - time.monotonic()))
            try:
                change = changes.next(left_s)
            except StoreUnavailableError as error:
                click.echo(f"{error.what}; trying again", err=True)
                time.sleep(left_s)
                changes = store.watch(prefix)
                continue
            if change is not None:
                _print_change(change.kind, change.key, change.value, output)
        changes.close()


def _print_change(kind: str, key: str, value: bytes | None, output: str) -> None:
    from mooncake_v0.metadata.http_store import change_row
    from mooncake_v0.metadata.store import Change

    if output == "json":
        click.echo(json.dumps(change_row(Change(kind, key, value))))
    else:
        text = "" if value is None else " " + printable(value.decode("utf-8", "backslashreplace").strip())
        click.echo(f"{time.strftime('%H:%M:%S')} {kind:6} {printable(key)}{text}")


@click.command()
@source_argument
@token_option
@format_option
def check(source: str, token_file: str | None, output: str) -> None:
    """Find and explain what is wrong in the store.

    Exit code 0: nothing; 1: findings; 2: the store could not be read. Loopback addresses
    alone are a note and do not change the exit code.

    \b
    Example:
      mooncake-v0 metadata check mooncake.json
    """
    from mooncake_v0.metadata.check import check_segments
    from mooncake_v0.metadata.liveness import judge_segments
    from mooncake_v0.metadata.prune import read_segments

    with opened(source, token_file) as store:
        segments = read_segments(store)
    findings = check_segments(segments, judge_segments(segments))
    if output == "json":
        click.echo(json.dumps({"segments": len(segments), "findings": [f.as_dict() for f in findings]}, indent=2))
    else:
        colours = {"error": "red", "warning": "yellow"}
        for finding in findings:
            severity = click.style(finding.severity, fg=colours.get(finding.severity))
            where = printable(finding.where)
            click.echo(f"{where}: {severity}: {finding.what} [{finding.rule}]")
            click.echo(f"  fix: {finding.fix}")
        click.echo(f"{_count(len(segments), 'segment')}, {_count(len(findings), 'finding')}")
    sys.exit(1 if any(finding.severity != INFO for finding in findings) else 0)


@click.command()
@source_argument
@click.option(
    "--prefix", type=KEY, multiple=True, metavar="TEXT", help="Only keys that begin so; by default all of ours."
)
@click.option("--output", "-o", "file", type=click.File("w"), default="-", help="File; standard output by default.")
@token_option
def export(source: str, prefix: tuple[str, ...], file: Any, token_file: str | None) -> None:
    """Write the keys as JSON lines, for `metadata import` or to look at.

    \b
    Example:
      mooncake-v0 metadata export mooncake.json -o before.jsonl
    """
    from mooncake_v0.metadata.archive import export_lines
    from mooncake_v0.metadata.segments import OUR_PREFIXES

    with opened(source, token_file) as store:
        entries = [entry for wanted in prefix or OUR_PREFIXES for entry in store.list(wanted)]
    for line in export_lines(entries):
        click.echo(line, file=file)
    click.echo(f"{len(entries)} keys", err=True)
