"""What `mooncake-v0 launch` checks before it starts anything: the file, the commands, this host. Uses validate's rules."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Sequence

from mooncake_v0.cli.launch_commands import Instance
from mooncake_v0.config.check import Checked, check_bytes, read_bytes
from mooncake_v0.config.inputs import launch_reports, make_report
from mooncake_v0.config.launch import Launch, make_launch
from mooncake_v0.config.model import MooncakeConfig
from mooncake_v0.config.render import FileReport
from mooncake_v0.config.rules import CheckOptions
from mooncake_v0.errors import ERROR, WARNING, Diagnostic

# the peer's machine may come up later than this one; its own rules say so, and it is no reason not to start
NOT_BLOCKING = ("online-peer-silent",)
ENVIRONMENT_CHECKS = ("plugin-variables", "own-variables")


def check(
    path: Path, instances: Sequence[Instance], *, host: bool, timeout_s: float, serve_metadata: bool
) -> tuple[MooncakeConfig | None, list[FileReport]]:
    """The configuration (None with an error in it) and one report for each input. Raises CouldNotCheckError."""
    api_ports = {instance.role: instance.api_port for instance in instances}
    checked = check_bytes(read_bytes(path), CheckOptions(instances[0].ranks, api_ports))
    more: list[Diagnostic] = []
    if host and checked.config is not None:
        more = _on_this_host(checked, instances, timeout_s, serve_metadata)
    reports = [make_report(str(path), (*checked.diagnostics, *more), strict=False)]
    reports += launch_reports([_launch(item) for item in instances], {str(path.resolve()): checked}, None, strict=False)
    return checked.config, reports


def _launch(instance: Instance) -> Launch:
    environment = {**os.environ, **instance.environment}
    return make_launch(instance.arguments, environment, f"the {instance.role} command")


def _on_this_host(
    checked: Checked, instances: Sequence[Instance], timeout_s: float, serve_metadata: bool
) -> list[Diagnostic]:
    from mooncake_v0.cli.validate_online import findings, gather

    assert checked.config is not None
    role = instances[0].role if len(instances) == 1 else None
    facts = gather(checked.config, instances[0].ranks, role, Path("/sys"), timeout_s)
    if serve_metadata:
        facts = replace(facts, metadata_failure="")
    found = [
        replace(item, severity=WARNING) if item.rule in NOT_BLOCKING else item for item in findings(facts, checked)
    ]
    found += _environment()
    return found + [_busy_api(instance) for instance in instances if _is_busy(instance.api_host, instance.api_port)]


def _environment() -> list[Diagnostic]:
    """Variables of this shell that keep the plugin out of vLLM, or that name files which cannot be read."""
    import mooncake_v0.doctor.catalogue  # noqa: F401 - registers the checks
    from mooncake_v0.doctor.host import Host
    from mooncake_v0.doctor.report import run_checks

    results = run_checks(Host(), ENVIRONMENT_CHECKS)
    return [
        Diagnostic(result.check, result.outcome.status, "environment", result.outcome.what, result.outcome.fix)
        for result in results
        if result.outcome.status in (ERROR, WARNING)
    ]


def _busy_api(instance: Instance) -> Diagnostic:
    return Diagnostic(
        "launch-api-port-busy",
        ERROR,
        "--port",
        f"port {instance.api_port}, for {instance.role}'s API, is taken on this machine",
        f"stop what `ss -ltnp 'sport = :{instance.api_port}'` shows, or give another port",
    )


def _is_busy(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0
