"""`mooncake-v0 doctor`: all that is known to go wrong on a host, in the documented order; and its other end, `--peer`."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

import click

from mooncake_v0.errors import ERROR, INFO, WARNING, CouldNotCheckError, Diagnostic

if TYPE_CHECKING:
    from mooncake_v0.config.check import Checked
    from mooncake_v0.config.model import Role
    from mooncake_v0.doctor.host import Host
    from mooncake_v0.doctor.report import Outcome, Result

HELP = """Find what is wrong on this host, and the command that repairs it.

Checks, in this order: mooncake.json, the network and firewalls, RDMA
devices, shared libraries and versions, memory and GPUs, environment
variables, the metadata store and clocks. Without FILE (or
MOONCAKE_CONFIG_PATH) only what needs no configuration is checked. It needs
neither vLLM nor the engine. Exit code: 0 no errors, 1 errors, 2 could not
check.

\b
Examples:
  mooncake-v0 doctor mooncake.json
  mooncake-v0 doctor mooncake.json --tp 4 --gpu-memory-utilization 0.8
  mooncake-v0 doctor mooncake.json --peer     (meanwhile on the other host)
  mooncake-v0 doctor mooncake.json --bundle support.tar.gz --log decode.log
  mooncake-v0 doctor --only shared-libraries --format json

`mooncake-v0 explain CHECK` tells more about a finding.
"""
COLOURS = {ERROR: "red", WARNING: "yellow", INFO: "cyan", "ok": "green", "skipped": "bright_black"}
EVIDENCE_LINES = 6


@dataclass(frozen=True)
class Request:
    """What one call asks for, beside the host's own facts."""

    file: str | None
    role: Role | None
    sysfs: Path
    only: tuple[str, ...]


@click.command(help=HELP)
@click.argument("file", required=False, envvar="MOONCAKE_CONFIG_PATH", metavar="[FILE]")
@click.option("--role", type=click.Choice(["prefill", "decode"]), help="The side that this host is, if both are.")
@click.option(
    "--tp", "ranks", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N", help="Tensor parallel size."
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0.01, 1.0),
    default=0.9,
    show_default=True,
    metavar="U",
    help="As given to vLLM.",
)
@click.option("--kv-buffer-size", default="2e9", show_default=True, metavar="SIZE", help="As given to vLLM.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 60),
    default=3.0,
    show_default=True,
    metavar="S",
    help="Seconds for each answer from the network.",
)
@click.option("--peer", is_flag=True, help="Answer the doctor on the other host, at this side's free ports.")
@click.option(
    "--for", "serve_s", type=click.FloatRange(1), default=600, show_default=True, metavar="S", help="Seconds of --peer."
)
@click.option("--only", multiple=True, metavar="CHECK", help="Only this check; may be repeated.")
@click.option("--bundle", type=click.Path(path_type=Path), metavar="FILE", help="Write a .tar.gz for support, masked.")
@click.option("--log", "logs", multiple=True, metavar="FILE", help="Put the end of this log into the bundle too.")
@click.option("--verbose", is_flag=True, help="Show all evidence, and what was skipped.")
@click.option("--sysfs", default="/sys", hidden=True, help="Root of sysfs, for tests.")
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def doctor(
    file: str | None,
    role: Role | None,
    ranks: int,
    gpu_memory_utilization: float,
    kv_buffer_size: str,
    timeout_s: float,
    peer: bool,
    serve_s: float,
    only: tuple[str, ...],
    bundle: Path | None,
    logs: tuple[str, ...],
    verbose: bool,
    sysfs: str,
    output: str,
) -> int:
    from mooncake_v0.config.kv_transfer import parse_size_bytes
    from mooncake_v0.doctor.host import Host

    buffer_bytes = parse_size_bytes(kv_buffer_size)
    if not buffer_bytes or buffer_bytes < 0:
        raise click.UsageError(f"--kv-buffer-size {kv_buffer_size!r} is not a size; write 2e9 or 4GiB")
    if logs and bundle is None:
        raise click.UsageError("--log is for --bundle")
    _refuse_unknown(only)
    host = Host(
        config_path=file or "mooncake.json",
        role=role,
        ranks=ranks,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_buffer_bytes=buffer_bytes,
        timeout_s=timeout_s,
        sys=Path(sysfs),
    )
    request = Request(file, role, Path(sysfs), only)
    if peer:
        return _answer_peer(request, host, serve_s)
    results = examine(request, host)
    if bundle is not None:
        from mooncake_v0.cli.doctor_bundle import write_bundle

        write_bundle(bundle, results, file, logs, dict(host.environment))
        click.echo(f"wrote {bundle}; secrets are masked, but look at it before you send it", err=True)
    _print(results, output, verbose)
    from mooncake_v0.doctor.report import exit_code

    return exit_code(results)


def _refuse_unknown(only: Sequence[str]) -> None:
    from mooncake_v0.doctor.catalogue import CHECKS

    for name in only:
        if name not in CHECKS:
            import difflib

            near = difflib.get_close_matches(name, CHECKS, n=1)
            hint = f"; the nearest is {near[0]}" if near else f"; there are {', '.join(CHECKS)}"
            raise click.UsageError(f"no check is named {name!r}{hint}")


def examine(request: Request, host: Host) -> list[Result]:
    """The file's findings, the host's facts by validate's online rules, then doctor's own checks."""
    from rich.console import Console

    import mooncake_v0.doctor.catalogue  # noqa: F401 - registers the checks
    from mooncake_v0.doctor.report import from_diagnostic, run_checks

    console = Console(stderr=True)
    with console.status("looking at the configuration and the network") as spinner:  # nothing without a terminal
        results: list[Result] = []
        checked = _read(request, host) if request.file is not None else None
        if checked is not None:
            # this kernel's own range counts here, not the usual one
            found = [item for item in checked.diagnostics if item.rule != "ephemeral-port"]
            if checked.config is not None:
                host, more = _with_facts(checked, request, host)
                found += more
            results = [] if request.only else [from_diagnostic(item) for item in found]
        for result in run_checks(host, request.only or None):
            spinner.update(f"checking; {result.check} is done")
            results.append(result)
    return results


def _read(request: Request, host: Host) -> Checked:
    from mooncake_v0.config.check import check_bytes, read_bytes
    from mooncake_v0.config.rules import CheckOptions

    assert request.file is not None
    return check_bytes(read_bytes(request.file), CheckOptions(host.ranks))


def _with_facts(checked: Checked, request: Request, host: Host) -> tuple[Host, list[Diagnostic]]:
    from mooncake_v0.cli.doctor_running import running_sides
    from mooncake_v0.cli.validate_online import findings, gather

    assert checked.config is not None
    facts = gather(checked.config, host.ranks, request.role, request.sysfs, host.timeout_s)
    # doctor says the same of the peer's ports, with the other host's own word where its doctor answers
    facts = replace(facts, reached={}) if facts.local else facts
    running = running_sides(facts, host)
    facts = replace(facts, busy={place: use for place, use in facts.busy.items() if place[0] not in running})
    known = replace(host, config=checked.config, local=facts.local, resolved=facts.resolved, running=running)
    # proxy variables are a check of doctor's own
    return known, [item for item in findings(facts, checked) if item.rule != "http-proxy"]


def _answer_peer(request: Request, host: Host, serve_s: float) -> int:
    from mooncake_v0.doctor.peer import Answering, plan_ports

    if request.file is None:
        raise click.UsageError("--peer needs the mooncake.json")
    checked = _read(request, host)
    if checked.config is None:
        raise click.UsageError(f"{request.file} is not valid; run `mooncake-v0 validate {request.file}` first")
    host, _ = _with_facts(checked, request, host)
    config = checked.config
    if len(host.local) != 1:
        how = "neither side's address is this host's" if not host.local else "both sides are this host; add --role"
        raise CouldNotCheckError(
            f"cannot tell which side to answer for: {how}", fix="run it on the other host of the pair"
        )
    side = host.local[0]
    address = host.resolved[config.endpoint(side).host]
    assert address is not None
    other: Role = "decode" if side == "prefill" else "prefill"
    end_s = time.monotonic() + serve_s
    ports, theirs = plan_ports(config, side, host.ranks), plan_ports(config, other, host.ranks)
    Answering(side, address, ports, theirs, host.timeout_s).serve(
        lambda free, taken: _say_listening(side, address, free, taken, request.file or "", serve_s),
        lambda source: click.echo(f"asked by {source}"),
        lambda: time.monotonic() < end_s,
    )
    return 0


def _say_listening(side: str, address: str, free: list[int], taken: list[int], file: str, serve_s: float) -> None:
    click.echo(f"answering for {side} at {address}, ports {', '.join(map(str, free))}, for {serve_s:.0f} s")
    if taken:
        click.echo(f"taken by another program: {', '.join(map(str, taken))}")
    click.echo(f"now run on the other host: mooncake-v0 doctor {file}")


def _print(results: Sequence[Result], output: str, verbose: bool) -> None:
    from mooncake_v0.doctor.report import exit_code, worst_first
    from mooncake_v0.migrate.secrets import Secrets

    secrets = Secrets()
    for result in results:
        secrets.scan(result.outcome.evidence)
    if output == "json":
        rows = [result.as_dict() for result in results]
        click.echo(secrets.mask(json.dumps({"healthy": not exit_code(results), "results": rows}, indent=2)))
        return
    for result in reversed(worst_first(results)):  # the worst last: it stays on the screen
        if verbose or result.outcome.status != "skipped":
            click.echo(secrets.mask(_as_text(result, verbose)))
    click.echo(_summary([result.outcome for result in results]))


def _as_text(result: Result, verbose: bool) -> str:
    outcome = result.outcome
    word = click.style(f"{outcome.status:<8}", fg=COLOURS[outcome.status])
    lines = [f"{word} {outcome.what} [{result.check}]"]
    if outcome.evidence and (verbose or outcome.status in (ERROR, WARNING)):
        shown = outcome.evidence.splitlines()
        limit = len(shown) if verbose else EVIDENCE_LINES
        lines += [f"           | {line}" for line in shown[:limit]]
        lines += [f"           | … {len(shown) - limit} more lines, with --verbose"] if len(shown) > limit else []
    if outcome.fix and (verbose or outcome.status != "ok"):
        lines.append(f"         fix: {outcome.fix}")
    if outcome.command and (verbose or outcome.status in (ERROR, WARNING)):
        lines.append(f"         run: {outcome.command}")
    return "\n".join(lines)


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in COLOURS}
    words = {ERROR: "error", WARNING: "warning", INFO: "note"}
    parts = [f"{counts[s]} {word}{'' if counts[s] == 1 else 's'}" for s, word in words.items()]
    return f"{', '.join(parts)}; {counts['ok']} right, {counts['skipped']} skipped"
