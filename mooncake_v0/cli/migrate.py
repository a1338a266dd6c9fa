"""`mooncake-v0 migrate`: read a V0 deployment, write the report towards V1 and the files to start it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from mooncake_v0.errors import UnsupportedError

_KEYS = ("gpu", "driver", "cuda", "python")


@click.command(
    epilog="""\b
Examples:
  mooncake-v0 migrate prefill.sh decode.sh mooncake.json proxy_server.py
  mooncake-v0 migrate deploy/ --hardware gpu=H100,driver=580,python=3.12
  mooncake-v0 migrate deploy/ --format html -o report.html
  mooncake-v0 migrate docker-compose.yml mooncake.json --emit v1/
  helm template chart/ | mooncake-v0 migrate - --check
"""
)
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--target", metavar="VERSION", help="vLLM version to move to (default: the newest one known).")
@click.option("--hardware", metavar="KEY=VALUE,...", default="", help="What V1 will run on: gpu, driver, cuda, python.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "md", "html", "json"]),
    default="text",
    show_default=True,
    help="Form of the report.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the report to a file.")
@click.option("--emit", "emit_to", type=click.Path(file_okay=False), help="Write V1 launch files into this folder.")
@click.option("--force", is_flag=True, help="With --emit: replace files that are there already.")
@click.option("--check", is_flag=True, help="Exit 1 if something blocks the move.")
@click.option("--facts", is_flag=True, help="List what is known about V1, and stop.")
def migrate(
    paths: tuple[str, ...],
    target: str | None,
    hardware: str,
    form: str,
    output: str | None,
    emit_to: str | None,
    force: bool,
    check: bool,
    facts: bool,
) -> int:
    """Say what it takes to run a V0 deployment on vLLM V1.

    PATH is a file or a folder: shell scripts, docker run, compose, Kubernetes manifests (render Helm charts first),
    systemd units, supervisord, Slurm scripts, mooncake.json, proxy scripts, runbooks in Markdown; "-" is standard input.

    Nothing of what is read is executed. Tokens, keys and passwords are masked in everything that is written.

    Exit codes: 0 good, 1 blocked (with --check), 2 could not read or wrong usage.
    """
    from mooncake_v0.migrate.facts import check_target, newest_target

    if facts:
        _print_facts(form)
        return 0
    if not paths:
        raise click.UsageError("give the files or folders of the deployment, or - for standard input")
    try:
        chosen = check_target(target or newest_target())
        keys = _hardware(hardware)
    except UnsupportedError as error:
        raise click.UsageError(f"{error.what}\n  fix: {error.fix}") from error
    return _report(paths, chosen, keys, form, output, emit_to, force, check)


def _report(
    paths: tuple[str, ...],
    target: str,
    hardware: dict[str, str],
    form: str,
    output: str | None,
    emit_to: str | None,
    force: bool,
    check: bool,
) -> int:
    from mooncake_v0.migrate.emit import emit
    from mooncake_v0.migrate.render import render
    from mooncake_v0.migrate.report import BLOCKED, build

    stdin = sys.stdin.buffer.read().decode("utf-8", errors="replace") if "-" in paths else ""
    migration = build(paths, target, hardware, stdin)
    text = render(migration.report, form)
    if output:
        _write(Path(output), text)
        click.echo(f"{output}: {migration.report.verdict}", err=True)
    else:
        click.echo(_safe(text), nl=False)
    if emit_to:
        for path in emit(migration, Path(emit_to), force=force):
            click.echo(f"wrote {path}", err=True)
    return 1 if check and migration.report.verdict == BLOCKED else 0


def _safe(text: str) -> str:
    """The text in the encoding of standard output, with ? for what it lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def _write(path: Path, text: str) -> None:
    from mooncake_v0.errors import CouldNotCheckError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CouldNotCheckError(f"cannot write {path}: {error.strerror}", fix="choose another --output") from error


def _hardware(text: str) -> dict[str, str]:
    from mooncake_v0.migrate.facts import compute_capability

    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if key not in _KEYS or not value:
            raise UnsupportedError(f"--hardware {part!r} is not KEY=VALUE", fix=f"use the keys {', '.join(_KEYS)}")
        pairs[key] = value.strip()
    if "gpu" in pairs and compute_capability(pairs["gpu"]) is None:
        raise UnsupportedError(
            f"--hardware gpu={pairs['gpu']!r} is not a GPU in the table",
            fix="give its compute capability instead, such as gpu=8.6",
        )
    return pairs


def _print_facts(form: str) -> None:
    from mooncake_v0.migrate.facts import all_facts

    rows: list[dict[str, Any]] = [dict(fact.as_dict()) for fact in all_facts()]
    if form == "json":
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for row in rows:
        span = f"{row.get('since', '')}..{row.get('until', '')}".strip(".")
        words = [row.get(key, "") for key in ("status", "severity", "title", "text", "replacement", "fix")]
        click.echo(
            f"{row['table']}  {row['name']}  {span or 'any'}  {': '.join(filter(None, words))}  [{row.get('source', '')}]"
        )
