"""Checks between the two hosts: ports in both directions, clocks. Names, routes and local ports are validate's rules."""

from __future__ import annotations

from functools import lru_cache
from typing import Iterator, Mapping

from mooncake_v0.config.model import ROLES, Role
from mooncake_v0.config.online import LISTENING, REFUSED, SILENT
from mooncake_v0.config.port_table import peer_ports
from mooncake_v0.doctor.host import Host
from mooncake_v0.doctor.peer import ANSWERED, Asked, ask, plan_ports
from mooncake_v0.doctor.report import ERROR, INFO, OK, SKIPPED, WARNING, Outcome, check

MAX_CLOCK_OFFSET_S = 10.0


def other_side(host: Host) -> Role | None:
    """The side that is another machine; None if both are here, or neither, or no config is given."""
    if host.config is None or len(host.local) != 1:
        return None
    return "decode" if host.local[0] == "prefill" else "prefill"


@lru_cache(maxsize=1)
def _ask_cached(address: str, ports: tuple[int, ...], own: str, own_ports: tuple[int, ...], timeout_s: float) -> Asked:
    """Two checks read the one conversation with the peer."""
    return ask(address, ports, own, own_ports, timeout_s)


def _asked(host: Host, side: Role) -> Asked | None:
    config, here = host.config, host.local[0]
    assert config is not None
    address, own = host.resolved.get(config.endpoint(side).host), host.resolved.get(config.endpoint(here).host)
    if address is None or own is None:
        return None
    ports = tuple(plan_ports(config, side, host.ranks)), tuple(plan_ports(config, here, host.ranks))
    return _ask_cached(address, ports[0], own, ports[1], host.timeout_s)


@check(ERROR)
def peer_firewall(host: Host) -> Iterator[Outcome]:
    """A port of the plan cannot be reached between the two hosts: a firewall drops or rejects it.

    Both directions are tried when `mooncake-v0 doctor mooncake.json --peer` runs on the other host meanwhile. Only the
    prefill host must let decode in; the other direction is a note.
    """
    side = other_side(host)
    if side is None or host.config is None:
        yield Outcome(SKIPPED, "needs a mooncake.json of two hosts, one of them this one")
        return
    asked = _asked(host, side)
    if asked is None:
        yield Outcome(SKIPPED, f"{host.config.endpoint(side).host} does not resolve here")
        return
    there, here = host.config.endpoint(side).host, host.config.endpoint(host.local[0]).host
    needed = peer_ports(host.config, host.ranks)
    yield from _there(host, there, side, asked, needed)
    if ANSWERED in asked.states.values():
        yield from _back(host, here, asked, needed)


def _there(host: Host, there: str, side: Role, asked: Asked, needed: list[int]) -> Iterator[Outcome]:
    """From this host to the other one."""
    evidence = _table(asked.states)
    if set(asked.states.values()) == {SILENT}:
        fix = f"check that the machine runs, the route to it, and its firewall: `mooncake-v0 ports {host.config_path}`"
        yield Outcome(ERROR, f"{there} does not answer at any port", evidence, fix, f"ping -c 3 {there}")
        return
    has_doctor = ANSWERED in asked.states.values()
    blocked = [port for port, state in asked.states.items() if state == SILENT]
    if has_doctor:
        blocked += [p for p, state in asked.states.items() if state == REFUSED and p not in asked.not_listening]
    yield from _blocked(host, sorted(blocked), there, needed if side == "prefill" else [], evidence)
    if not has_doctor and REFUSED in asked.states.values() and LISTENING not in asked.states.values():
        what = f"nothing listens on {there}: no vLLM and no doctor runs there"
        fix = "run the doctor's other end there, to know what its firewall lets in"
        yield Outcome(INFO, what, evidence, fix, f"mooncake-v0 doctor {host.config_path} --peer")
    elif not blocked:
        yield Outcome(OK, f"{there} can be reached from here at {len(asked.states)} ports", evidence)


def _back(host: Host, here: str, asked: Asked, needed: list[int]) -> Iterator[Outcome]:
    """From the other host to this one, as its doctor found."""
    blocked = sorted(port for port, state in asked.reached.items() if state != LISTENING)
    yield from _blocked(host, blocked, here, needed if host.local[0] == "prefill" else [], _table(asked.reached))
    if not blocked:
        yield Outcome(OK, f"the other host reaches {here} at {len(asked.reached)} ports", _table(asked.reached))


def _blocked(host: Host, ports: list[int], where: str, needed: list[int], evidence: str) -> Iterator[Outcome]:
    command = f"mooncake-v0 ports {host.config_path} --tp {host.ranks} --firewall iptables  # or ufw, firewalld"
    for is_needed, status in ((True, ERROR), (False, INFO)):
        chosen = [port for port in ports if (port in needed) == is_needed]
        if chosen:
            numbers = ", ".join(map(str, chosen))
            why = "" if is_needed else "; nothing needs to reach it there"
            fix = f"let the other host in on {where}; the command prints the rules" if is_needed else "nothing"
            what = f"port{'s' if len(chosen) > 1 else ''} {numbers} of {where} cannot be reached: a firewall is between{why}"
            yield Outcome(status, what, evidence, fix, command if is_needed else "")


def _table(states: Mapping[int, str]) -> str:
    by_state: dict[str, list[str]] = {}
    for port, state in states.items():
        by_state.setdefault(state, []).append(str(port))
    return "; ".join(f"{state}: {', '.join(ports)}" for state, ports in by_state.items())


@check(WARNING)
def peer_clock(host: Host) -> Iterator[Outcome]:
    """The two hosts' clocks differ. Records in the metadata store then look old or new, and live instances look dead."""
    side = other_side(host)
    asked = _asked(host, side) if side is not None else None
    if asked is None or asked.clock_offset_s is None:
        yield Outcome(SKIPPED, "the other host's clock is not known: no doctor --peer answers there")
        return
    offset_s = asked.clock_offset_s
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        what = f"the other host's clock is {abs(offset_s):.0f} s {'ahead' if offset_s > 0 else 'behind'}"
        yield Outcome(WARNING, what, "", "synchronise both clocks", "timedatectl set-ntp true")
    else:
        yield Outcome(OK, "the clocks of both hosts agree")


@check(INFO)
def running_instance(host: Host) -> Iterator[Outcome]:
    """Whether a side of this host runs already: its agents answer. Then its ports and memory are taken by right.

    `mooncake-v0 status` shows what the agents say.
    """
    for side in host.running:
        yield Outcome(OK, f"{side} runs here, and its agents answer")
    if not host.running:
        yield Outcome(SKIPPED, "no side of the pair runs on this host, or no mooncake.json")


@check(WARNING)
def local_port_range(host: Host) -> Iterator[Outcome]:
    """A port of the plan lies in the range from which the kernel takes ports for outgoing connections.

    Then any connection may hold it when the instance starts, which fails with "Address already in use" now and then.
    """
    if host.config is None:
        yield Outcome(SKIPPED, "no mooncake.json")
        return
    text = (host.proc / "sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    first, last = (int(part) for part in text.split())
    sides: tuple[Role, ...] = host.local or ROLES
    inside = sorted(p for side in sides for p in plan_ports(host.config, side, host.ranks) if first <= p <= last)
    if inside:
        ports = f"{inside[0]}-{inside[-1]}"
        what = f"ports of the plan ({ports}) lie in the kernel's range for outgoing connections, {first}-{last}"
        fix = f"use ports below {first}, or reserve these"
        yield Outcome(WARNING, what, text.strip(), fix, f"sysctl net.ipv4.ip_local_reserved_ports={ports}")
    else:
        yield Outcome(OK, f"no port of the plan lies in the kernel's range {first}-{last}")
