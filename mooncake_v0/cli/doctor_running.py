"""Which sides run on this host already: their agents answer. What they hold is then no trouble for doctor to report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_v0.errors import AgentUnavailableError, CouldNotCheckError

if TYPE_CHECKING:
    from mooncake_v0.config.model import Role
    from mooncake_v0.config.online_rules import HostFacts
    from mooncake_v0.doctor.host import Host


def running_sides(facts: HostFacts, host: Host) -> tuple[Role, ...]:
    """The local sides of which every rank's agent answers at its side channel, whatever it says of its peer."""
    found = []
    for side in facts.local:
        channels = [facts.config.ports(side, rank).side_channel for rank in range(host.ranks)]
        # a free port needs no question, and so no timeout
        if all((side, port) in facts.busy for port in channels) and _agents_answer(facts, side, host):
            found.append(side)
    return tuple(found)


def _agents_answer(facts: HostFacts, side: Role, host: Host) -> bool:
    from mooncake_v0.cli.status import read_secret
    from mooncake_v0.transfer.status import query_status

    try:
        secret = read_secret(host.environment.get("MOONCAKE_V0_SECRET_FILE"))
        for rank in range(host.ranks):
            ports = facts.config.ports(side, rank)
            found = query_status(ports.host, ports.side_channel, timeout_s=host.timeout_s, secret=secret)
            if (found.role, found.rank) != (side, rank):
                return False
    except (CouldNotCheckError, AgentUnavailableError):
        return False  # another program has the port; own-variables names a secret that cannot be read
    return True
