"""`mooncake-v0 validate`: everything that is wrong with the configuration of a V0 pair, before it starts.

Arguments become inputs (config.inputs), inputs become reports, reports become text and an exit code. Only what the call
needs is imported: one file without options loads neither a YAML parser nor a store.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

import click

from mooncake_v0.config.addresses import without_password
from mooncake_v0.config.check import Checked, check_bytes
from mooncake_v0.config.model import Role
from mooncake_v0.config.render import FileReport
from mooncake_v0.config.rules import CheckOptions
from mooncake_v0.errors import ERROR, Diagnostic

if TYPE_CHECKING:
    from mooncake_v0.config.launch import Launch

FORMATS = ("text", "json", "sarif", "github")
COLOURS = {"error": "red", "warning": "yellow", "info": "cyan", "good": "green"}

HELP = """Check mooncake.json, the launch commands and the host of a V0 pair.

Without FILES the file in MOONCAKE_CONFIG_PATH is checked; - is standard
input. Several files are taken for copies of one file (prefill's and
decode's) and compared. Exit code: 0 valid, 1 not valid, 2 could not check.

\b
Examples:
  mooncake-v0 validate mooncake.json
  mooncake-v0 validate prefill/mooncake.json decode/mooncake.json
  mooncake-v0 validate mooncake.json --role decode --tp 4 --api-port 8200
  mooncake-v0 validate --launch start_prefill.sh
  mooncake-v0 validate mooncake.json --online --role prefill
  mooncake-v0 validate mooncake.json --fix
  mooncake-v0 validate configs/*.json --no-compare --format sarif

`mooncake-v0 explain RULE` tells more about a finding.
"""


@dataclass(frozen=True)
class Request:
    """The arguments of one call."""

    files: tuple[str, ...]
    role: Role | None
    tensor_parallel_size: int | None
    api_port: int | None
    kv_transfer_config: str | None
    launch: tuple[str, ...]
    strict: bool
    compare: bool


@click.command(help=HELP)
@click.argument("files", nargs=-1, metavar="[FILES|-]")
@click.option("--format", "output", type=click.Choice(FORMATS), default="text", show_default=True, help="How to print.")
@click.option(
    "--role", type=click.Choice(["prefill", "decode"]), help="The side that this machine is, or is checked for."
)
@click.option(
    "--tp", "tensor_parallel_size", type=click.IntRange(1, 16), metavar="N", help="Tensor parallel size, 1 to 16."
)
@click.option("--api-port", type=click.IntRange(1, 65535), metavar="P", help="Port of vLLM's API (its --port).")
@click.option("--kv-transfer-config", metavar="JSON", help="Check this text of vLLM's option too.")
@click.option("--launch", multiple=True, metavar="FILE", help="Check the vLLM commands in a script, unit or manifest.")
@click.option("--online", is_flag=True, help="Also ask the metadata server, the name service, this host and the peer.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 60),
    default=3.0,
    show_default=True,
    help="Seconds for each online answer.",
)
@click.option("--sysfs", default="/sys", hidden=True, help="Root of sysfs, for tests.")
@click.option("--strict", is_flag=True, help="A warning is as bad as an error.")
@click.option("--fix", "fix", is_flag=True, help="Write the changes that are certain; show them and keep a backup.")
@click.option("--no-compare", is_flag=True, help="The files are not copies of one another.")
def validate(
    files: tuple[str, ...],
    output: str,
    role: Role | None,
    tensor_parallel_size: int | None,
    api_port: int | None,
    kv_transfer_config: str | None,
    launch: tuple[str, ...],
    online: bool,
    timeout_s: float,
    sysfs: str,
    strict: bool,
    fix: bool,
    no_compare: bool,
) -> int:
    files = _default_files(files, needed=kv_transfer_config is None and not launch)
    if files.count("-") > 1 or "-" in files and "-" in launch:
        raise click.UsageError("standard input (-) can be given once")
    if fix and "-" in files:
        raise click.UsageError("--fix needs a file, not standard input")
    request = Request(files, role, tensor_parallel_size, api_port, kv_transfer_config, launch, strict, not no_compare)
    session = Session(request, sys.stdin.buffer.read() if "-" in files else None)
    if fix:
        session = _fix(session, output)
    if online:
        from mooncake_v0.cli.validate_online import add_online_findings

        add_online_findings(session, sysfs, timeout_s)
    return _print(session.reports(), output, session.could_not_check)


def _default_files(files: tuple[str, ...], *, needed: bool) -> tuple[str, ...]:
    named = os.environ.get("MOONCAKE_CONFIG_PATH")
    if files or not needed:
        return tuple(dict.fromkeys(files))
    if not named:
        raise click.UsageError(
            "no file given, and MOONCAKE_CONFIG_PATH is not set; example: mooncake-v0 validate mooncake.json"
        )
    return (named,)


class Session:
    """The inputs of one call, checked, and what else was found about each."""

    def __init__(self, request: Request, stdin: bytes | None) -> None:
        from mooncake_v0.config.inputs import named_configs, options_for, read_input

        self.request = request
        self.launch_failures: list[FileReport] = []
        self.launches = self._read_launches()
        named = [path for path in named_configs(self.launches) if path not in map(_absolute, request.files)]
        self.options: CheckOptions = options_for(
            self.launches,
            role=request.role,
            tensor_parallel_size=request.tensor_parallel_size,
            api_port=request.api_port,
        )
        self.inputs = [read_input(path, self.options, stdin) for path in (*request.files, *map(_relative, named))]
        self.more: dict[str, list[Diagnostic]] = {item.path: [] for item in self.inputs}
        self.extra_reports: list[FileReport] = []

    def _read_launches(self) -> list[Launch]:
        if not self.request.launch:
            return []
        from mooncake_v0.cli.validate_launch import read_launches

        launches, self.launch_failures = read_launches(self.request.launch)
        return launches

    @property
    def checked(self) -> list[tuple[str, Checked]]:
        return [(item.path, item.checked) for item in self.inputs if item.checked is not None]

    @property
    def could_not_check(self) -> bool:
        unchecked = any(report.diagnostics[0].rule == "file-unreadable" for report in self.launch_failures)
        return unchecked or any(item.failure is not None for item in self.inputs)

    def reports(self) -> list[FileReport]:
        from mooncake_v0.config.inputs import KV_OPTION, kv_report, launch_reports, report_of

        request = self.request
        if request.compare and len(self.checked) > 1:
            from mooncake_v0.config.compare import compare

            for path, differences in compare(self.checked).items():
                self.more[path].extend(differences)
        reports = [report_of(item, self.more[item.path], request.strict) for item in self.inputs]
        if request.kv_transfer_config is not None:
            text, role = request.kv_transfer_config, request.role
            reports.append(kv_report(text, KV_OPTION, role=role, api_port=request.api_port, strict=request.strict))
        configs = {_absolute(path): checked for path, checked in self.checked}
        reports += launch_reports(self.launches, configs, request.role, request.strict)
        return reports + self.launch_failures + self.extra_reports


def _absolute(path: str) -> str:
    return path if path == "-" or "\0" in path else str(Path(path).resolve())


def _relative(path: str) -> str:
    """The path as a user would write it: relative if it is below the current folder."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def _fix(session: Session, output: str) -> Session:
    """Apply what is certain to every file that can be read, and check again."""
    from mooncake_v0.config.fix import fixed_bytes, write_with_backup

    changed = []
    for item in session.inputs:
        new = fixed_bytes(item.data, session.options) if item.checked is not None else item.data
        if new != item.data:
            backup = write_with_backup(Path(item.path), item.data, new)
            click.echo(_diff(item.path, item.data, new), err=output != "text", nl=False)
            click.echo(f"{item.path}: changed; the old file is {backup}", err=output != "text")
        changed.append(replace(item, data=new, checked=item.checked and check_bytes(new, session.options)))
    session.inputs = changed
    return session


def _diff(path: str, old: bytes, new: bytes) -> str:
    import difflib

    before, after = (data.decode("utf-8", "replace").splitlines(keepends=True) for data in (old, new))
    diff = difflib.unified_diff(before, after, fromfile=path, tofile=f"{path} (fixed)")
    return "".join(without_password(line if line.endswith("\n") else line + "\n") for line in diff)


def _print(reports: Sequence[FileReport], output: str, could_not_check: bool) -> int:
    from mooncake_v0.config import render

    if output == "text":
        text = render.as_text(reports, lambda word, kind: click.style(word, fg=COLOURS[kind], bold=kind == ERROR))
    else:
        text = {"json": render.as_json, "sarif": render.as_sarif, "github": render.as_github}[output](reports)
    if text:
        click.echo(text.encode("utf-8", "backslashreplace").decode("utf-8"))
    if could_not_check:
        return 2
    return 0 if all(report.valid for report in reports) else 1
