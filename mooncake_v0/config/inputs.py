"""One report for each input of `validate`: a mooncake.json, a --kv-transfer-config, the launch commands of a file.

Combines the checks of this package with what the inputs know of each other: a launch command gives the tensor parallel
size and API port to the mooncake.json's port plan, the model's KV size to the buffer's rule. No printing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Mapping, Sequence

from mooncake_v0.config.addresses import parse_metadata, same_host
from mooncake_v0.config.check import Checked, check_bytes, read_bytes
from mooncake_v0.config.kv_transfer import check_kv_transfer_config
from mooncake_v0.config.launch import Launch
from mooncake_v0.config.launch_rules import LAUNCH_RULES, PROXY_RULES, Proxied
from mooncake_v0.config.model import Role
from mooncake_v0.config.model_size import ModelSize, read_model_size
from mooncake_v0.config.pair_rules import PAIR_RULES, pairs
from mooncake_v0.config.render import FileReport
from mooncake_v0.config.rules import CheckOptions, Finding, Rule
from mooncake_v0.config.rules.registry import explain_only
from mooncake_v0.config.source import render_path, shorten
from mooncake_v0.errors import ERROR, INFO, WARNING, CouldNotCheckError, Diagnostic

explain_only(
    "file-unreadable",
    ERROR,
    """A file could not be read: it does not exist, is a directory, or permission is denied. Exit code 2, not 1.

    vLLM's user must be able to read the file that MOONCAKE_CONFIG_PATH names.
    """,
)

explain_only(
    "launch-config-unchecked",
    INFO,
    """The file that MOONCAKE_CONFIG_PATH names for a command is not on this machine, so it was not checked.

    Check it where it is, or give it beside --launch. A relative path is looked for beside the script, and then in the
    current folder, as vLLM would.
    """,
    "launch_rules",
)

STDIN = "-"
KV_OPTION = "--kv-transfer-config"


@dataclass(frozen=True)
class Input:
    """One mooncake.json: its bytes and their check, or why it could not be read."""

    path: str
    data: bytes = b""
    checked: Checked | None = None
    failure: CouldNotCheckError | None = None


def read_input(path: str, options: CheckOptions, stdin: bytes | None = None) -> Input:
    try:
        data = stdin if path == STDIN and stdin is not None else read_bytes(path)
    except CouldNotCheckError as error:
        return Input(path, failure=error)
    return Input(path, data, check_bytes(data, options))


def report_of(item: Input, more: Sequence[Diagnostic], strict: bool) -> FileReport:
    if item.failure is not None:
        unreadable = Diagnostic("file-unreadable", ERROR, "$", item.failure.what, item.failure.fix)
        return FileReport(item.path, False, (unreadable,))
    assert item.checked is not None
    return make_report(item.path, (*item.checked.diagnostics, *more), strict)


def make_report(path: str, diagnostics: Sequence[Diagnostic], strict: bool) -> FileReport:
    """The report on one input; with strict, a warning also makes it not valid."""
    blocking = (ERROR, WARNING) if strict else (ERROR,)
    return FileReport(path, not any(item.severity in blocking for item in diagnostics), tuple(diagnostics))


def options_for(
    launches: Sequence[Launch], *, role: Role | None, tensor_parallel_size: int | None, api_port: int | None
) -> CheckOptions:
    """What the port plan must respect: the caller's word first, then what the launch commands say.

    An API port without a role counts for both sides: both machines may run the same command.
    """
    sizes = {launch.tensor_parallel_size for launch in launches if launch.kv_text is not None}
    known = [size for size in sizes if size is not None]
    if tensor_parallel_size is None and known and len(known) == len(sizes):
        tensor_parallel_size = max(known)
    ports: dict[Role, int] = {}
    for launch in launches:
        if launch.role is not None and launch.api_port is not None:
            ports[launch.role] = launch.api_port
    if api_port is not None:
        ports = {role: api_port} if role is not None else {"prefill": api_port, "decode": api_port}
    return CheckOptions(tensor_parallel_size, ports)


def kv_report(text: str, path: str, *, role: Role | None, api_port: int | None, strict: bool) -> FileReport:
    """The report on a --kv-transfer-config that was given by itself."""
    _, found = check_kv_transfer_config(text, role=role, api_port=api_port)
    return make_report(path, [_kv_diagnostic(rule, finding, None) for rule, finding in found], strict)


def launch_reports(
    launches: Sequence[Launch], configs: Mapping[str, Checked], role: Role | None, strict: bool
) -> list[FileReport]:
    """One report for each file that holds launch commands; configs are the mooncake.json files by absolute path."""
    found: dict[str, list[Diagnostic]] = {launch.path: [] for launch in launches}
    for launch in launches:
        found[launch.path].extend(_launch_diagnostics(launch, configs, role))
    for pair in pairs(launches, lambda launch: _on_one_machine(configs.get(config_path(launch) or ""))):
        for rule, finding in PAIR_RULES.run(pair):
            found[pair.second.path].append(_diagnostic(rule, finding, pair.second.line))
    return [make_report(path, diagnostics, strict) for path, diagnostics in found.items()]


def _launch_diagnostics(launch: Launch, configs: Mapping[str, Checked], role: Role | None) -> Iterator[Diagnostic]:
    for rule, finding in LAUNCH_RULES.run(launch):
        yield _diagnostic(rule, finding, launch.line)
    if launch.kv_text is not None:
        size = _model_size(launch)
        tokens = launch.number("max_model_len") or (size.max_position_tokens if size else 0) or 0
        _, found = check_kv_transfer_config(
            launch.kv_text,
            role=role if launch.role is None else launch.role,
            api_port=launch.api_port,
            prompt_bytes=size.prompt_bytes(tokens, launch.tensor_parallel_size or 1) if size and tokens else None,
            max_prompt_tokens=tokens,
        )
        yield from (_kv_diagnostic(rule, finding, launch.line) for rule, finding in found)
    named = config_path(launch)
    if launch.transfers and named is not None and not Path(named).is_file():
        what = f"MOONCAKE_CONFIG_PATH is {shorten(launch.environment['MOONCAKE_CONFIG_PATH'])}, which is not on this machine"
        fix = "check that file where it is; nothing, if the command runs on another machine"
        yield Diagnostic("launch-config-unchecked", INFO, "MOONCAKE_CONFIG_PATH", what, fix, launch.line, 1)
    checked = configs.get(named or "")
    server = checked.config.metadata_server if checked is not None and checked.config is not None else None
    address = parse_metadata(server) if server is not None else None
    if address is not None:
        for rule, finding in PROXY_RULES.run(Proxied(launch.environment, address)):
            yield _diagnostic(rule, finding, launch.line)


def _on_one_machine(checked: Checked | None) -> bool | None:
    if checked is None or checked.config is None:
        return None
    return same_host(checked.config.prefill.host, checked.config.decode.host)


def config_path(launch: Launch) -> str | None:
    """The absolute path in MOONCAKE_CONFIG_PATH; a relative one is beside the file of the command. None if unknown."""
    written = launch.environment.get("MOONCAKE_CONFIG_PATH", "")
    if not written or "$" in written or "\0" in written:
        return None
    beside = Path(launch.path).parent / written
    return str((beside if beside.exists() else Path(written)).resolve())


def named_configs(launches: Iterable[Launch]) -> list[str]:
    """The mooncake.json files that the commands name and that are on this machine."""
    paths = [config_path(launch) for launch in launches if launch.kv_text is not None]
    return list(dict.fromkeys(path for path in paths if path is not None and Path(path).is_file()))


def _model_size(launch: Launch) -> ModelSize | None:
    """The model's KV size if --model names a folder on this machine; its name on a hub says nothing here."""
    model = launch.flag("model")
    if not model or "\0" in model or not (Path(model) / "config.json").is_file():
        return None
    try:
        return read_model_size(model, kv_cache_dtype=launch.flag("kv_cache_dtype"), dtype=launch.flag("dtype"))
    except CouldNotCheckError:
        return None  # `mooncake-v0 size` says why; here it only means that the buffer's size cannot be judged


def _diagnostic(rule: Rule, finding: Finding, line: int | None) -> Diagnostic:
    where = ".".join(str(step) for step in finding.path) or "command"
    return Diagnostic(
        rule.name, finding.severity or rule.severity, where, finding.what, finding.fix, line, 1 if line else None
    )


def _kv_diagnostic(rule: Rule, finding: Finding, line: int | None) -> Diagnostic:
    where = KV_OPTION + render_path(finding.path)[1:]
    return Diagnostic(
        rule.name, finding.severity or rule.severity, where, finding.what, finding.fix, line, 1 if line else None
    )
