"""Rules about the two endpoints together, and about every port that the plan in `config.model` derives from them."""

from __future__ import annotations

from typing import Iterator

from mooncake_v0.config.addresses import is_loopback, same_host
from mooncake_v0.config.model import EQUAL_URL_OFFSET, PORT_SPAN, ROLES, Endpoint, RankPorts, Role, rank_ports
from mooncake_v0.config.rules.registry import FIELDS, Edit, Finding, Subject, rule
from mooncake_v0.config.source import quote
from mooncake_v0.errors import ERROR, INFO, WARNING

PREFILL, DECODE = ("prefill_url",), ("decode_url",)
SEPARATION = 50  # upstream's documented rule for one host
# /proc/sys/net/ipv4/ip_local_port_range of a stock Linux: ports that outgoing connections take at random
EPHEMERAL = (32768, 60999)
# where an engine without MC_LEGACY_RPC_PORT_BINDING (a Mooncake Store, another connector) binds
# (engine 0.3.3.post2, transfer_metadata_plugin.cpp; the data port is one higher)
ENGINE_RANDOM = (15000, 17001)
ENGINE_HANDSHAKE = 12001


def plan(endpoint: Endpoint, ranks: int) -> dict[int, str]:
    """Port -> its use, for every port of one side with that many ranks."""
    uses: dict[int, str] = {}
    for rank in range(ranks):
        row: RankPorts = rank_ports(endpoint, rank)
        uses[row.handshake] = f"engine handshake of rank {rank}"
        uses[row.data] = f"engine data of rank {rank}"
        uses[row.side_channel] = f"side channel of rank {rank}"
    return uses


def pair(subject: Subject) -> tuple[Endpoint, Endpoint] | None:
    prefill, decode = subject.final["prefill"], subject.final["decode"]
    return (prefill, decode) if prefill is not None and decode is not None else None


@rule(INFO)
def equal_urls(subject: Subject) -> Iterator[Finding]:
    """prefill_url and decode_url are equal: decode's port gets +100, once, on both sides (upstream's documented rule).

    Writing the port that is really used spares the next reader the surprise.
    """
    written = subject.written["prefill"], subject.written["decode"]
    if written[0] is not None and written[0] == written[1] and pair(subject) is not None:
        moved = Endpoint(written[0].host, written[0].port + EQUAL_URL_OFFSET)
        if moved.port + PORT_SPAN - 1 <= 65535:
            what = f"both URLs are {written[0]}, so decode uses port {moved.port}"
            yield Finding(DECODE, what, f"write {quote(str(moved))}", Edit(DECODE, str(moved)), related=(PREFILL,))


@rule(ERROR)
def ports_overlap(subject: Subject) -> Iterator[Finding]:
    """On one host, prefill and decode would bind the same port.

    Rank r of a side binds base + 2r (engine handshake), base + 2r + 1 (engine data) and base + 32 + r (side channel),
    so a pair with --tensor-parallel-size needs the more room the larger that is. 50 apart is always enough. Give --tp
    for the exact answer; without it every size up to 16 must fit, which is upstream's documented rule of 50.
    """
    both = pair(subject)
    if both is None or not same_host(both[0].host, both[1].host):
        return
    prefill, decode = both
    ranks = subject.options.ranks
    common = sorted(set(plan(prefill, ranks)) & set(plan(decode, ranks)))
    apart = abs(prefill.port - decode.port)
    free = f"use ports at least {SEPARATION} apart, for example {quote(f'{decode.host}:{_apart_from(prefill.port)}')}"
    if common and subject.options.tensor_parallel_size is not None:
        uses = f"{plan(prefill, ranks)[common[0]]} of prefill and {plan(decode, ranks)[common[0]]} of decode"
        yield Finding(DECODE, f"port {common[0]} would be both {uses}", free, related=(PREFILL,))
    elif apart < SEPARATION and subject.options.tensor_parallel_size is None:
        what = f"prefill and decode on one host are {apart} ports apart, {SEPARATION} are needed"
        yield Finding(DECODE, what, f"{free}, or give --tp to check the ports of that size alone", related=(PREFILL,))


@rule(WARNING)
def ports_too_close(subject: Subject) -> Iterator[Finding]:
    """On one host, prefill and decode are less than 50 apart, but their ports do not meet at this tensor parallel size.

    It works now, and stops working when the size grows. Upstream asks for 50.
    """
    both = pair(subject)
    ranks = subject.options.tensor_parallel_size
    if both is None or ranks is None or not same_host(both[0].host, both[1].host):
        return
    prefill, decode = both
    if abs(prefill.port - decode.port) < SEPARATION and not set(plan(prefill, ranks)) & set(plan(decode, ranks)):
        what = (
            f"{abs(prefill.port - decode.port)} ports apart is enough for tensor parallel {ranks}, not for every size"
        )
        fix = (
            f"use ports at least {SEPARATION} apart, for example {quote(f'{decode.host}:{_apart_from(prefill.port)}')}"
        )
        yield Finding(DECODE, what, fix, related=(PREFILL,))


def _apart_from(port: int) -> int:
    return port + EQUAL_URL_OFFSET if port + EQUAL_URL_OFFSET + PORT_SPAN <= 65536 else port - EQUAL_URL_OFFSET


@rule(ERROR)
def port_plan_overflow(subject: Subject) -> Iterator[Finding]:
    """A port of the plan is above 65535, after the offsets of the ranks and the +100 of equal URLs."""
    for role in ROLES:
        endpoint = subject.final[role]
        if endpoint is not None and (highest := max(plan(endpoint, subject.options.ranks))) > 65535:
            use = plan(endpoint, subject.options.ranks)[highest]
            moved = " (+100, since both URLs are equal)" if endpoint != subject.written[role] else ""
            what = f"port {endpoint.port}{moved} puts the {use} at {highest}"
            related = (PREFILL,) if moved else ()
            yield Finding((FIELDS[role],), what, f"use a port of at most {65535 - PORT_SPAN + 1}", related=related)


@rule(ERROR)
def loopback_mixed(subject: Subject) -> Iterator[Finding]:
    """One side is "localhost" and the other is not.

    The file is the same on both machines, and 127.0.0.1 is a different machine on each: the other side would connect
    to itself. Loopback is right only if both instances run on one machine, and then for both.
    """
    both = pair(subject)
    if both is None or is_loopback(both[0].host) == is_loopback(both[1].host):
        return
    role: Role = "prefill" if is_loopback(both[0].host) else "decode"
    local, other = (both[0], both[1]) if role == "prefill" else (both[1], both[0])
    what = f"{local.host} is another machine for each side, the peer is {other.host}"
    fix = f"write the address under which {other.host} reaches {role}; on one machine write {local.host} for both"
    yield Finding((FIELDS[role],), what, fix, related=(PREFILL, DECODE))


@rule(ERROR)
def api_port_clash(subject: Subject) -> Iterator[Finding]:
    """The OpenAI API's port (--port, 8000 by default) is one that the pair's plan needs on the same machine."""
    for role, api_port in subject.options.api_ports.items():
        for side in ROLES:
            endpoint, own = subject.final[side], subject.final[role]
            if endpoint is None or own is None or not (side == role or same_host(endpoint.host, own.host)):
                continue
            use = plan(endpoint, subject.options.ranks).get(api_port)
            if use is not None:
                what = f"API port {api_port} of {role} is also the {use} of {side}"
                yield Finding((FIELDS[side],), what, "change --port, or the port of this URL")


@rule(ERROR)
def metadata_port_clash(subject: Subject) -> Iterator[Finding]:
    """The metadata server's port is one that the plan of a side on the same machine needs."""
    if subject.metadata is None:
        return
    for role in ROLES:
        endpoint = subject.final[role]
        for host, port in subject.metadata.hosts:
            if endpoint is None or not same_host(host, endpoint.host):
                continue
            use = plan(endpoint, subject.options.ranks).get(port or subject.metadata.port)
            if use is not None:
                what = f"the metadata server's port {port or subject.metadata.port} is also the {use} of {role}"
                fix = f"use a {role} port that is 50 away from it"
                yield Finding((FIELDS[role],), what, fix, related=(("metadata_server",),))


@rule(WARNING)
def ephemeral_port(subject: Subject) -> Iterator[Finding]:
    """A port of the plan lies where Linux takes ports for outgoing connections (32768 to 60999 by default).

    Any connection of the machine may hold the port when the engine wants to bind it. It then fails to start, once in a
    while, for no visible reason.
    """
    for role in ROLES:
        endpoint = subject.written[role]
        if endpoint is not None and _meets(endpoint, subject.options.ranks, EPHEMERAL):
            what = f"ports from {endpoint.port} on are in the range for outgoing connections"
            fix = f"use a port below {EPHEMERAL[0] - PORT_SPAN}, or reserve them in net.ipv4.ip_local_reserved_ports"
            yield Finding((FIELDS[role],), what, fix)


@rule(INFO)
def engine_default_port(subject: Subject) -> Iterator[Finding]:
    """A port of the plan is one where other Mooncake engines on the machine may sit.

    An engine without MC_LEGACY_RPC_PORT_BINDING (a Mooncake Store, a V1 connector) binds random ports of 15000 to
    17001; 12001 is its default handshake port. This package's own ranks never do that.
    """
    for role in ROLES:
        endpoint = subject.written[role]
        if endpoint is None:
            continue
        uses = plan(endpoint, subject.options.ranks)
        if ENGINE_HANDSHAKE in uses or _meets(endpoint, subject.options.ranks, ENGINE_RANDOM):
            what = f"ports from {endpoint.port} on are also used by other Mooncake engines"
            yield Finding(
                (FIELDS[role],),
                what,
                "nothing, unless a Mooncake Store or a V1 instance runs on the machine; 13003 is free of them",
            )


def _meets(endpoint: Endpoint, ranks: int, interval: tuple[int, int]) -> bool:
    return any(interval[0] <= port <= interval[1] for port in plan(endpoint, ranks))
