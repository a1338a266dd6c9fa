"""Every port of a pair as a table: who binds it, who connects to it; and the firewall rules that follow.

The arithmetic is `config.model`'s. Who connects follows from the transfer: decode reads, so decode's agents connect to
prefill's, never the other way round. Printed by `mooncake-v0 ports`; `validate --online` tries what it says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Iterator, Mapping, Sequence

from mooncake_v0.config.addresses import parse_metadata, same_host
from mooncake_v0.config.model import ROLES, MooncakeConfig, Role
from mooncake_v0.url_parts import IPV4

NOBODY = "nobody"


@dataclass(frozen=True)
class PortUse:
    """One listening port. side is the machine that binds it; rank is None for a port that is not a rank's.

    connects: who opens connections to it: "decode", "both", "proxy", "this host" (status requests) or "nobody".
    """

    side: str
    host: str
    rank: int | None
    port: int
    use: str
    protocol: str
    connects: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def port_table(config: MooncakeConfig, ranks: int, api_ports: Mapping[Role, int]) -> list[PortUse]:
    """The ports of both sides, rank by rank, then the API's and the metadata server's."""
    table = [row for side in ROLES for rank in range(ranks) for row in _rank(config, side, rank)]
    for side, port in api_ports.items():
        table.append(PortUse(side, config.endpoint(side).host, None, port, "vLLM API", "http", "proxy"))
    address = parse_metadata(config.metadata_server)
    for host, given in address.hosts if address is not None else ():
        assert address is not None
        table.append(PortUse("metadata", host, None, given or address.port, "metadata server", address.scheme, "both"))
    return table


def _rank(config: MooncakeConfig, side: Role, rank: int) -> Iterator[PortUse]:
    row = config.ports(side, rank)
    is_prefill = side == "prefill"
    rdma = config.protocol == "rdma"
    yield PortUse(
        side, row.host, rank, row.handshake, "engine handshake", "tcp", "decode" if rdma and is_prefill else NOBODY
    )
    yield PortUse(side, row.host, rank, row.data, "engine data", "tcp", "decode" if not rdma and is_prefill else NOBODY)
    yield PortUse(
        side, row.host, rank, row.side_channel, "side channel", "tcp", "decode" if is_prefill else "this host"
    )


def peer_ports(config: MooncakeConfig, ranks: int) -> list[int]:
    """The ports of the prefill machine that the decode machine must reach."""
    return [row.port for row in port_table(config, ranks, {}) if row.side == "prefill" and row.connects == "decode"]


def ranges(ports: Sequence[int]) -> list[tuple[int, int]]:
    """Ports as (first, last) runs of neighbours: [1, 2, 5] gives [(1, 2), (5, 5)]."""
    runs: list[tuple[int, int]] = []
    for port in sorted(set(ports)):
        if runs and port == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], port)
        else:
            runs.append((port, port))
    return runs


@dataclass(frozen=True)
class Opening:
    """Ports that a machine must let in from another: on host, from source, as runs of ports."""

    host: str
    source: str
    runs: tuple[tuple[int, int], ...]


def openings(config: MooncakeConfig, ranks: int) -> list[Opening]:
    """What the prefill machine must let in from decode; nothing if both are one machine."""
    if same_host(config.prefill.host, config.decode.host):
        return []
    ports = peer_ports(config, ranks)
    # the runs of a side span handshake and data ports: one rule for 13003-13010 is better than eight for odd ports
    whole = range(min(ports), max(port for port in ports if port < config.prefill.port + 32) + 1)
    side_channels = [port for port in ports if port >= config.prefill.port + 32]
    return [Opening(config.prefill.host, config.decode.host, tuple(ranges([*whole, *side_channels])))]


def firewalld(opening: Opening) -> list[str]:
    """Permanent rich rules; rich rules take addresses only."""
    lines = [
        f'firewall-cmd --permanent --add-rich-rule=\'rule family="ipv4" source address="{_address(opening.source)}" '
        f'port port="{_run(run, "-")}" protocol="tcp" accept\''
        for run in opening.runs
    ]
    return [*lines, "firewall-cmd --reload"]


def ufw(opening: Opening) -> list[str]:
    return [f"ufw allow from {_address(opening.source)} to any port {_run(run, ':')} proto tcp" for run in opening.runs]


def iptables(opening: Opening) -> list[str]:
    return [
        f"iptables -A INPUT -p tcp -s {_address(opening.source)} --dport {_run(run, ':')} -j ACCEPT"
        for run in opening.runs
    ]


def _run(run: tuple[int, int], separator: str) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}{separator}{run[1]}"


def _address(host: str) -> str:
    """Firewalls want addresses; a name is left for the reader to replace."""
    return host if IPV4.fullmatch(host) else f"ADDRESS-OF-{host}"
