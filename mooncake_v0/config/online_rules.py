"""What the facts about a host and its network mean (`validate --online`).

The facts come as data (`HostFacts`); the functions of `config.online` gather them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterator, Mapping, Optional

from mooncake_v0.config.addresses import is_loopback, same_host
from mooncake_v0.config.model import ROLES, Endpoint, MooncakeConfig, Role
from mooncake_v0.config.online import LISTENING, REFUSED, SILENT, ApiAnswer
from mooncake_v0.config.rdma import RdmaPort, chosen_gid
from mooncake_v0.config.rules.ports import plan
from mooncake_v0.config.rules.registry import FIELDS, Checks, Finding, explain_only
from mooncake_v0.config.source import shorten
from mooncake_v0.errors import ERROR, INFO, WARNING

METADATA = ("metadata_server",)
POOL_BYTES = 2 << 30  # engine 0.3.3.post2 registers a pool of 2 GiB at start (transfer_engine_py.cpp)


@dataclass(frozen=True)
class HostFacts:
    """What was found out about one config from this machine.

    resolved:  host as written -> IPv4 address, None if the name does not resolve
    local:     sides whose address is this machine's
    busy:      port -> who asks for it, for ports of a local side that are taken
    reached:   (side, port) -> listening, refused or silent, for the ports of a side that is another machine
    metadata_failure: why the round trip of a probe key failed; wrong_answer: the server answered, but not with the key
    rdma_ports: device -> its port, None if the host has no such device; empty if not looked at
    apis:      what the OpenAI API of a side said, where its port is known
    """

    config: MooncakeConfig
    ranks: int
    resolved: Mapping[str, Optional[str]] = field(default_factory=dict)
    local: tuple[Role, ...] = ()
    busy: Mapping[tuple[Role, int], str] = field(default_factory=dict)
    reached: Mapping[tuple[Role, int], str] = field(default_factory=dict)
    metadata_failure: str = ""
    metadata_fix: str = ""
    wrong_answer: bool = False
    rdma_ports: Mapping[str, Optional[RdmaPort]] = field(default_factory=dict)
    rdma_known: tuple[str, ...] = ()
    rdma_port_number: int = 1
    gid_index: int = 0
    memlock_bytes: int | None = None
    apis: Mapping[Role, ApiAnswer] = field(default_factory=dict)
    api_ports: Mapping[Role, int] = field(default_factory=dict)


ONLINE_RULES: Checks[HostFacts] = Checks()

explain_only(
    "online-skipped",
    INFO,
    """--online was given, but the file has errors, so that there are no certain addresses to ask. Correct them first.""",
    __name__,
)


@ONLINE_RULES.rule(ERROR)
def online_metadata_unreachable(facts: HostFacts) -> Iterator[Finding]:
    """A key of our own could not be written to the metadata server, read back and deleted again."""
    if facts.metadata_failure:
        fix = facts.metadata_fix or "start the metadata server, or correct metadata_server; check the firewall between"
        yield Finding(METADATA, facts.metadata_failure, fix)


@ONLINE_RULES.rule(ERROR)
def online_metadata_wrong_answer(facts: HostFacts) -> Iterator[Finding]:
    """Something answers at metadata_server, but it does not keep what is written to it.

    Often another web server has the port, and the metadata server that was started there reported one error and stays
    alive without serving anything.
    """
    if facts.wrong_answer:
        what = f"{shorten(facts.config.metadata_server)} answers, but does not give back what was written"
        yield Finding(
            METADATA, what, "check which program has this port (`ss -ltnp`), and start a metadata server there"
        )


@ONLINE_RULES.rule(ERROR)
def online_name(facts: HostFacts) -> Iterator[Finding]:
    """A host name does not resolve to an IPv4 address on this machine. It must on both."""
    for role in ROLES:
        host = facts.config.endpoint(role).host
        if host in facts.resolved and facts.resolved[host] is None:
            fix = "write the IPv4 address, or add the name to DNS or /etc/hosts on both machines"
            yield Finding((FIELDS[role],), f"{host!r} has no IPv4 address here", fix)


@ONLINE_RULES.rule(ERROR)
def online_name_loopback(facts: HostFacts) -> Iterator[Finding]:
    """A name resolves to this machine's loopback, but the pair is two machines.

    Debian puts the machine's own name as 127.0.1.1 into /etc/hosts. The engine then advertises or binds loopback, and
    the peer does not reach it.
    """
    prefill, decode = facts.config.prefill, facts.config.decode
    for role in ROLES:
        host = facts.config.endpoint(role).host
        address = facts.resolved.get(host)
        if address is None or is_loopback(host) or not is_loopback(address):
            continue
        if not _one_machine(facts, prefill, decode):
            what = f"{host!r} is {address} here, which the other machine cannot reach"
            yield Finding((FIELDS[role],), what, f"write the IPv4 address, or correct {host} in /etc/hosts")


@ONLINE_RULES.rule(INFO)
def online_name_resolved(facts: HostFacts) -> Iterator[Finding]:
    """What a host name resolves to on this machine. Compare it with the other machine's answer."""
    for role in ROLES:
        host = facts.config.endpoint(role).host
        address = facts.resolved.get(host)
        if address is not None and address != host:
            yield Finding((FIELDS[role],), f"{host!r} is {address} here", "nothing, if the peer sees the same address")


@ONLINE_RULES.rule(ERROR)
def online_ports_overlap(facts: HostFacts) -> Iterator[Finding]:
    """Two different names or addresses turn out to be one machine, and the ports of the two sides meet there.

    See ports-overlap, which compares the names as they are written.
    """
    prefill, decode = facts.config.prefill, facts.config.decode
    if same_host(prefill.host, decode.host) or not _one_machine(facts, prefill, decode):
        return
    common = sorted(set(plan(prefill, facts.ranks)) & set(plan(decode, facts.ranks)))
    if common:
        what = f"{prefill.host} and {decode.host} are one machine, and both sides need port {common[0]}"
        yield Finding((FIELDS["decode"],), what, "use ports at least 50 apart")


def _one_machine(facts: HostFacts, one: Endpoint, other: Endpoint) -> bool:
    if set(facts.local) == set(ROLES):
        return True
    first, second = facts.resolved.get(one.host), facts.resolved.get(other.host)
    return first is not None and second is not None and same_host(first, second)


@ONLINE_RULES.rule(INFO)
def online_not_this_host(facts: HostFacts) -> Iterator[Finding]:
    """Neither address is this machine's, so that its ports and RDMA devices say nothing. Run it on both machines."""
    if not facts.local:
        what = f"neither {facts.config.prefill.host} nor {facts.config.decode.host} is this machine"
        yield Finding(
            (), what, "run it on the prefill and on the decode machine; there ports and devices are checked too"
        )


@ONLINE_RULES.rule(ERROR)
def online_port_busy(facts: HostFacts) -> Iterator[Finding]:
    """A port that a local side needs is taken. If this side is running already, that is how it should be."""
    for role in ROLES:
        taken = {port: use for (side, port), use in facts.busy.items() if side == role}
        if taken:
            port, use = next(iter(taken.items()))
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            fix = f"stop what `ss -ltnp` shows at it, or move {FIELDS[role]}; nothing, if {role} is running already"
            yield Finding((FIELDS[role],), f"port {port} ({use}){more} is taken on this machine", fix)


@ONLINE_RULES.rule(ERROR)
def online_peer_silent(facts: HostFacts) -> Iterator[Finding]:
    """A port of the peer does not answer at all: a firewall drops the packets, or there is no way to the machine."""
    for role, ports in _peer_ports(facts, SILENT).items():
        host = facts.config.endpoint(role).host
        fix = f"open the ports on {host} (`mooncake-v0 ports` prints the rules), and check the route to it"
        yield Finding((FIELDS[role],), f"{host} does not answer at {_numbers(ports)}", fix)


@ONLINE_RULES.rule(INFO)
def online_peer_not_listening(facts: HostFacts) -> Iterator[Finding]:
    """The peer's machine answers, but nothing listens at the ports yet: its vLLM is not running.

    A firewall that rejects instead of dropping looks the same.
    """
    for role, ports in _peer_ports(facts, REFUSED).items():
        host = facts.config.endpoint(role).host
        yield Finding(
            (FIELDS[role],), f"nothing listens at {_numbers(ports)} of {host}", f"nothing, if {role} is not started yet"
        )


def _peer_ports(facts: HostFacts, state: str) -> dict[Role, list[int]]:
    found: dict[Role, list[int]] = {}
    for (role, port), answer in facts.reached.items():
        if answer == state:
            found.setdefault(role, []).append(port)
    return found


def _numbers(ports: list[int]) -> str:
    return f"port {ports[0]}" if len(ports) == 1 else "ports " + ", ".join(map(str, ports))


@ONLINE_RULES.rule(ERROR)
def online_rdma_missing(facts: HostFacts) -> Iterator[Finding]:
    """A device in device_name is not on this machine, or has no port of this number (MC_IB_PORT, 1 by default).

    The engine starts all the same and reports success; then every transfer fails.
    """
    have = ", ".join(facts.rdma_known) or "none"
    for name, port in facts.rdma_ports.items():
        if port is None and name not in facts.rdma_known:
            fix = "write one of them" if facts.rdma_known else 'load its driver, or use "protocol": "tcp"'
            yield Finding(("device_name",), f"no RDMA device {name!r} on this machine; it has: {have}", fix)
        elif port is None:
            what = f"{name} has no port {facts.rdma_port_number}"
            yield Finding(("device_name",), what, "set MC_IB_PORT to a port of the device")


@ONLINE_RULES.rule(ERROR)
def online_rdma_inactive(facts: HostFacts) -> Iterator[Finding]:
    """The port of an RDMA device is not ACTIVE: no cable, no link, or no subnet manager (InfiniBand)."""
    for name, port in facts.rdma_ports.items():
        if port is not None and not port.is_active:
            fix = "bring its link up (`rdma link`, `ibstat`); InfiniBand also needs a subnet manager"
            yield Finding(("device_name",), f"port {port.port} of {name} is {port.state or 'in an unknown state'}", fix)


@ONLINE_RULES.rule(ERROR)
def online_rdma_gid(facts: HostFacts) -> Iterator[Finding]:
    """The engine finds no usable GID (the RDMA address of a port).

    Without MC_GID_INDEX it takes the first RoCE v2 entry with an IPv4 address, else entry 0. An empty GID disables the
    device, a RoCE v1 one does not cross a router, and both machines must use the same kind.
    """
    for name, port in facts.rdma_ports.items():
        if port is None:
            continue
        gid = chosen_gid(port, facts.gid_index)
        if gid is None or gid.is_null:
            asked = f"GID {facts.gid_index} (MC_GID_INDEX) of {name} is empty"
            what = asked if facts.gid_index > 0 else f"{name} has no RoCE v2 GID with an IPv4 address"
            fix = "give its network interface an IPv4 address, or set MC_GID_INDEX to an entry that `show_gids` lists"
            severity = ERROR if facts.gid_index > 0 or not any(not item.is_null for item in port.gids) else WARNING
            yield Finding(("device_name",), what, fix, severity=severity)


@ONLINE_RULES.rule(ERROR)
def online_memlock(facts: HostFacts) -> Iterator[Finding]:
    """The limit on locked memory (ulimit -l) is below what RDMA registers: 2 GiB of the engine alone, and the buffer."""
    limit = facts.memlock_bytes
    if facts.config.protocol == "rdma" and limit is not None and limit < POOL_BYTES:
        what = f"locked memory is limited to {limit} bytes, the engine alone locks {POOL_BYTES}"
        fix = (
            "set it to unlimited: `ulimit -l unlimited`, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker)"
        )
        yield Finding(("protocol",), what, fix)


@ONLINE_RULES.rule(ERROR)
def online_api_wrong(facts: HostFacts) -> Iterator[Finding]:
    """Something answers at the API's port, but it is not vLLM's OpenAI API.

    Often the port of the engine, the proxy or another service was given.
    """
    for role, answer in facts.apis.items():
        if answer.state == LISTENING and answer.models is None:
            where = f"{facts.config.endpoint(role).host}:{facts.api_ports[role]}"
            yield Finding(
                ("--api-port",), f"{where} is not vLLM's API", f"give the --port with which {role} is started"
            )


@ONLINE_RULES.rule(INFO)
def online_api_not_running(facts: HostFacts) -> Iterator[Finding]:
    """Nothing answers at the API's port: this side is not started yet, or the port is another."""
    for role, answer in facts.apis.items():
        if answer.state != LISTENING:
            where = f"{facts.config.endpoint(role).host}:{facts.api_ports[role]}"
            yield Finding(("--api-port",), f"no API answers at {where}", f"nothing, if {role} is not started yet")


@ONLINE_RULES.rule(ERROR)
def online_api_models(facts: HostFacts) -> Iterator[Finding]:
    """Prefill and decode serve different models. The proxy sends one request to both, so the names must be the same."""
    prefill, decode = facts.apis.get("prefill"), facts.apis.get("decode")
    ours, theirs = (answer.models if answer is not None else None for answer in (prefill, decode))
    if ours and theirs and not set(ours) & set(theirs):
        what = f"prefill serves {', '.join(map(repr, ours))}, decode {', '.join(map(repr, theirs))}"
        yield Finding(("--api-port",), shorten(what, 200), "start both with the same --model or --served-model-name")
