"""The `--online` part of `validate`: gathers facts about the host and the network, and adds what they mean."""

from __future__ import annotations

import os
import resource
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Mapping

from mooncake_v0.cli.waiting import waiting_for
from mooncake_v0.config import rdma
from mooncake_v0.config.addresses import parse_metadata
from mooncake_v0.config.check import Checked
from mooncake_v0.config.launch_rules import PROXY_RULES, Proxied
from mooncake_v0.config.model import ROLES, MooncakeConfig, Role
from mooncake_v0.config.online import ask_api, busy_ports, is_local, reach, resolve, round_trip
from mooncake_v0.config.online_rules import ONLINE_RULES, HostFacts
from mooncake_v0.config.port_table import peer_ports
from mooncake_v0.config.rules.registry import where
from mooncake_v0.digits import number
from mooncake_v0.errors import INFO, Diagnostic, MooncakeV0Error

if TYPE_CHECKING:
    from mooncake_v0.cli.validate import Session

PROBE_PREFIX = "mooncake-v0/probe/"


def add_online_findings(session: Session, sysfs: str, timeout_s: float) -> None:
    """Probe the outside for each valid mooncake.json of the session. Files with errors have no addresses to ask."""
    for path, checked in session.checked:
        if checked.config is None:
            what, fix = "nothing was asked online, since the file has errors", "correct them, and run it again"
            session.more[path].append(Diagnostic("online-skipped", INFO, "$", what, fix))
        else:
            ranks = session.options.tensor_parallel_size or 1
            with waiting_for("the metadata server and the peer"):
                facts = gather(checked.config, ranks, session.request.role, Path(sysfs), timeout_s)
                facts = with_apis(facts, session.options.api_ports, timeout_s)
            session.more[path].extend(findings(facts, checked))


def findings(facts: HostFacts, checked: Checked) -> list[Diagnostic]:
    found = [(rule, finding) for rule, finding in ONLINE_RULES.run(facts)]
    address = parse_metadata(facts.config.metadata_server)
    if address is not None:
        found += PROXY_RULES.run(Proxied(os.environ, address))
    diagnostics = []
    for rule, finding in found:
        in_file = bool(finding.path) and finding.path in checked.document.spans
        line, column = checked.document.place(finding.path if in_file else ()) or (None, None)
        place = where(finding.path) if in_file or not finding.path else str(finding.path[0])
        severity = finding.severity or rule.severity
        diagnostics.append(Diagnostic(rule.name, severity, place, finding.what, finding.fix, line, column))
    return diagnostics


def gather(config: MooncakeConfig, ranks: int, role: Role | None, sysfs: Path, timeout_s: float) -> HostFacts:
    """All facts about one config. Each question ends within timeout_s, the metadata server's within a few of them."""
    failure, fix, wrong = _ask_metadata(config.metadata_server, timeout_s)
    resolved = {config.endpoint(side).host: resolve(config.endpoint(side).host, timeout_s) for side in ROLES}
    local = tuple(side for side in ROLES if _is_local(resolved[config.endpoint(side).host], side, role))
    facts = HostFacts(
        config,
        ranks,
        resolved,
        local,
        metadata_failure=failure,
        metadata_fix=fix,
        wrong_answer=wrong,
        busy={(side, port): use for side in local for port, use in _busy(config, ranks, side, resolved).items()},
        reached=_reached(config, ranks, resolved, timeout_s) if "prefill" not in local else {},
    )
    return _with_rdma(facts, sysfs) if config.protocol == "rdma" and local else facts


def with_apis(facts: HostFacts, api_ports: Mapping[Role, int], timeout_s: float) -> HostFacts:
    """The facts with what the sides' APIs say, where their ports and addresses are known."""
    apis = {}
    for side, port in api_ports.items():
        address = facts.resolved.get(facts.config.endpoint(side).host)
        if address is not None:
            apis[side] = ask_api(address, port, timeout_s)
    return replace(facts, apis=apis, api_ports=api_ports)


def _is_local(address: str | None, side: Role, role: Role | None) -> bool:
    """Whether this side is this machine; --role leaves the other side out, as when both run on one machine."""
    return address is not None and is_local(address) and role in (None, side)


def _busy(config: MooncakeConfig, ranks: int, side: Role, resolved: dict[str, str | None]) -> dict[int, str]:
    address = resolved[config.endpoint(side).host]
    return busy_ports(address, [config.ports(side, rank) for rank in range(ranks)]) if address else {}


def _reached(
    config: MooncakeConfig, ranks: int, resolved: dict[str, str | None], timeout_s: float
) -> dict[tuple[Role, int], str]:
    """Answers of the prefill machine at the ports that decode connects to; prefill connects to none of decode's."""
    address = resolved[config.prefill.host]
    if address is None:
        return {}
    answers = reach(address, peer_ports(config, ranks), timeout_s)
    return {("prefill", port): answer for port, answer in answers.items()}


def _ask_metadata(url: str, timeout_s: float) -> tuple[str, str, bool]:
    """Why the round trip failed and what to do ("" if it worked), and whether the answers were wrong."""
    from mooncake_v0.metadata.store import open_store

    try:
        store = open_store(url, timeout_s=timeout_s)
        try:
            right = round_trip(store, PROBE_PREFIX + uuid.uuid4().hex, uuid.uuid4().hex.encode())
        finally:
            store.close()
    except MooncakeV0Error as error:
        return error.what, error.fix, False
    return "", "", not right


def _with_rdma(facts: HostFacts, sysfs: Path) -> HostFacts:
    port = _environment_number("MC_IB_PORT", 1)
    gid_index = _environment_number("MC_GID_INDEX", _environment_number("NCCL_IB_GID_INDEX", 0))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return replace(
        facts,
        rdma_ports={name: rdma.read_port(sysfs, name, port) for name in facts.config.device_names},
        rdma_known=tuple(rdma.device_names(sysfs)),
        rdma_port_number=port,
        gid_index=gid_index,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def _environment_number(name: str, default: int) -> int:
    value = number(os.environ.get(name))
    return default if value is None else value
