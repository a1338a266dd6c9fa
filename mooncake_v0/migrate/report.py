"""Puts the report together: paths in, one frozen `Report` out, which `render` words and `emit` writes files from.

`build` is the entry point, called by the command line. The report is a function of the files, the target and the
hardware: the same input gives the same bytes. Only `read` and `unread` name files and lines, so that the same deployment
written in two formats differs there and nowhere else. Every string in a report has been masked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Mapping, Sequence

from mooncake_v0.migrate.checks import Advisory, Finding, advisories, check
from mooncake_v0.migrate.convert import Change, V1Instance, convert, quote, unresolved
from mooncake_v0.migrate.deployment import Deployment, assemble
from mooncake_v0.migrate.facts import PINNED, applies, table
from mooncake_v0.migrate.files import Files, collect
from mooncake_v0.migrate.instances import Instance
from mooncake_v0.migrate.ports import PortRow, bootstrap_ports, firewall, plan
from mooncake_v0.migrate.proxy_plan import ProxyPlan, plan_proxy
from mooncake_v0.migrate.questions import questions
from mooncake_v0.migrate.records import Found
from mooncake_v0.migrate.rollout import Step, prerequisites, steps
from mooncake_v0.migrate.secrets import Secrets, is_secret_name

READY, CHANGES, BLOCKED = "ready", "ready with changes", "blocked"


@dataclass(frozen=True)
class InstanceReport:
    """One instance, before and after."""

    name: str
    role: str
    model: str
    architecture: str
    quantization: str
    host: str
    v0_command: str
    v1_command: str
    v1_env: tuple[tuple[str, str], ...]
    v1_argv: tuple[str, ...]
    kv_transfer_config: str
    changes: tuple[Change, ...]
    not_carried: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The whole report; see the module docstring."""

    target: str
    verdict: str
    reasons: tuple[str, ...]
    today: tuple[tuple[str, str], ...]
    instances: tuple[InstanceReport, ...]
    ports: tuple[PortRow, ...]
    firewall: tuple[str, ...]
    proxy: ProxyPlan | None
    proxy_commands: tuple[str, ...]
    prerequisites: tuple[dict[str, str], ...]
    findings: tuple[Finding, ...]
    advisories: tuple[Advisory, ...]
    metrics: tuple[dict[str, str], ...]
    rollout: tuple[Step, ...]
    questions: tuple[str, ...]
    read: tuple[dict[str, str], ...]
    unread: tuple[dict[str, str], ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Migration:
    """The report, and what `emit` needs beside it."""

    report: Report
    deployment: Deployment
    instances: tuple[V1Instance, ...]
    secrets: Secrets


def build(paths: Sequence[str], target: str, hardware: Mapping[str, str], stdin: str = "") -> Migration:
    """Read the paths and report; CouldNotCheckError for a path that cannot be read."""
    files, found = collect(paths, stdin)
    secrets = Secrets()
    found = Files(files, found, secrets).read()
    _collect_secrets(found, secrets)
    deployment = assemble(found)
    ports = bootstrap_ports(deployment, target)
    instances = tuple(convert(item, target, ports.get(item.name)) for item in deployment.instances())
    report = _report(deployment, instances, found, target, hardware, secrets)
    masked = Report(**{key: secrets.mask_deep(getattr(report, key)) for key in report.__dataclass_fields__})
    return Migration(masked, deployment, instances, secrets)


def _collect_secrets(found: Found, secrets: Secrets) -> None:
    """Values of variables and flags whose name says that they are secret, after expansion."""
    for invocation in found.invocations:
        for name, value in invocation.env:
            if is_secret_name(name):
                secrets.add(value)
        for word, following in zip(invocation.argv, [*invocation.argv[1:], ""]):
            name, equals, value = word.partition("=")
            if name.startswith("--") and is_secret_name(name):
                secrets.add(value if equals else following)


def _report(
    deployment: Deployment,
    instances: Sequence[V1Instance],
    found: Found,
    target: str,
    hardware: Mapping[str, str],
    secrets: Secrets,
) -> Report:
    findings = tuple(check(deployment, target, hardware))
    proxy = plan_proxy(deployment, instances, target)
    rows = plan(instances, deployment, target)
    asked = tuple(questions(deployment, instances, hardware, unresolved(instances)))
    verdict, reasons = _verdict(deployment, instances, findings, proxy, found)
    return Report(
        target=target,
        verdict=verdict,
        reasons=reasons,
        today=tuple(_today(deployment)),
        instances=tuple(_instance(item) for item in instances),
        ports=tuple(rows),
        firewall=tuple(firewall(rows, "proxy")) if proxy else (),
        proxy=proxy,
        proxy_commands=tuple(proxy.commands()) if proxy else (),
        prerequisites=tuple(row.as_dict() for row in prerequisites(target)),
        findings=findings,
        advisories=tuple(advisories(deployment, target)) if instances else (),
        metrics=tuple(row.as_dict() for row in table("metrics") if applies(row, target)),
        rollout=tuple(steps(deployment, instances, proxy, target)) if instances else (),
        questions=asked,
        read=tuple(_read(deployment)),
        unread=tuple(_unread(found, secrets)),
    )


def _verdict(
    deployment: Deployment,
    instances: Sequence[V1Instance],
    findings: Sequence[Finding],
    proxy: ProxyPlan | None,
    found: Found,
) -> tuple[str, tuple[str, ...]]:
    """Blocked by any blocker; ready only where nothing but the version changes."""
    if not instances:
        return BLOCKED, ("no vLLM instance was found in what was given",)
    blockers = [f"{finding.title}: {finding.text}" for finding in findings if finding.severity == "blocker"]
    if blockers:
        return BLOCKED, tuple(blockers)
    reasons = [
        f"{finding.title}: {finding.fix or finding.text}" for finding in findings if finding.severity == "change"
    ]
    changed = sum(1 for item in instances for change in item.changes if change.before != change.after)
    if changed:
        reasons.append(f"{changed} flags, variables and keys change; the new commands are below")
    lost = [flag for item in instances for flag in item.not_carried]
    if lost:
        reasons.append(f"{len(lost)} flags are known to no release and were left out: {', '.join(lost)}")
    old_proxies = sorted({item.kind for item in deployment.proxies} - {"v1"})
    if proxy is not None and (old_proxies or not deployment.proxies):
        reasons.append("the proxy must be replaced: without transfer_id no KV moves and nothing says so")
    missing = [pair for pair in deployment.pairs if pair.prefill is None or pair.decode is None]
    if missing:
        reasons.append("one side of a pair was not given")
    return (CHANGES if reasons else READY), tuple(reasons) or ("only the version changes",)


def _today(deployment: Deployment) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in deployment.versions)
    rows = [("versions named", versions or f"none; {PINNED} is assumed")]
    used = [pair.config for pair in deployment.pairs if pair.config is not None] or list(deployment.configs)
    for config in {config.identity(): config for config in used}.values():
        server = config.text("metadata_server")
        rows.append(("mooncake.json", f"protocol {config.protocol}, device {config.text('device_name') or 'none'}"))
        if server:
            rows.append(("metadata service", f"{server}; not needed by V1 (peers meet through the bootstrap server)"))
    rows.append(("pairs", str(len(deployment.pairs))))
    if deployment.plain:
        rows.append(("instances without KV transfer", str(len(deployment.plain))))
    return rows


def _instance(item: V1Instance) -> InstanceReport:
    original = item.original
    architecture = original.architecture or "not known"
    return InstanceReport(
        name=item.name,
        role=item.role,
        model=original.model or "(none named)",
        architecture=f"{architecture} (guessed from the name)"
        if original.architecture and original.architecture_guessed
        else architecture,
        quantization=original.quantization or "none named",
        host=original.host or "not known",
        v0_command=_v0_command(original),
        v1_command=item.command(),
        v1_env=item.env,
        v1_argv=item.argv,
        kv_transfer_config=item.kv_transfer_config(),
        changes=item.changes,
        not_carried=item.not_carried,
    )


def _v0_command(original: Instance) -> str:
    """The V0 command in one canonical form, whatever the format it was written in."""
    words: list[str] = []
    for name, value in original.env:
        words.append(f"{name}={quote(value)}")
    if original.arguments.entrypoint == "module":
        words += ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    else:
        words += ["vllm", "serve", quote(original.model)]
    for flag in original.arguments.flags:
        words += [flag.name, *map(quote, flag.values)]
    return " ".join(words)


def _unread(found: Found, secrets: Secrets) -> list[dict[str, str]]:
    """Notes, but for those about files that turned out to be named by another one."""
    rows = [entry for entry in found.unread if not (entry.what == entry.place.file and entry.what in found.used)]
    return [{"place": str(row.place), "what": secrets.mask_source(row.what), "why": row.why} for row in rows]


def _read(deployment: Deployment) -> list[dict[str, str]]:
    rows = []
    for item in deployment.instances():
        invocation = item.invocation
        row = {
            "part": item.name,
            "place": str(invocation.place),
            "form": invocation.shape.launcher,
            "called": invocation.name,
        }
        rows.append({**row, "image": invocation.image})
    for config in deployment.configs:
        rows.append({"part": "mooncake.json", "place": str(config.place), "form": "json", "called": "", "image": ""})
    for proxy in deployment.proxies:
        rows.append(
            {
                "part": f"proxy ({proxy.kind})",
                "place": str(proxy.place),
                "form": proxy.shape.launcher,
                "called": "",
                "image": "",
            }
        )
    for kind, place in deployment.metadata_services:
        rows.append({"part": f"metadata service ({kind})", "place": str(place), "form": "", "called": "", "image": ""})
    return rows
