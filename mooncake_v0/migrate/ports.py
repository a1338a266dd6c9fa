"""Which ports V1 opens on which host, who must reach them, and firewall lines for it. Called by `report`.

Target 0.16.0 and newer: one HTTP bootstrap port per prefill instance, random ports for ZeroMQ and Mooncake RPC. Targets
0.13.0 to 0.15.x: ZeroMQ on base + dp_rank * tp_size + tp_rank, base = VLLM_MOONCAKE_BOOTSTRAP_PORT. Source: wheels
0.13.0 and 0.33.0, kv_connector/v1/mooncake.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Sequence

from mooncake_v0.digits import port_number
from mooncake_v0.migrate.convert import STORE, V1Instance
from mooncake_v0.migrate.deployment import Deployment
from mooncake_v0.migrate.facts import has
from mooncake_v0.migrate.instances import Instance

BOOTSTRAP_PORT = 8998
ZMQ_RANGE = (49152, 65535)
RPC_RANGE = (15000, 17000)
MAX_RANKS = 1024


@dataclass(frozen=True)
class PortRow:
    """One port or range. peers: hosts or parts that connect to it."""

    instance: str
    host: str
    use: str
    ports: str
    bind: str
    peers: tuple[str, ...]


def bootstrap_ports(deployment: Deployment, target: str) -> dict[str, int]:
    """A bootstrap (or ZeroMQ base) port for every instance that prefills, unique on its host.

    Before 0.16.0 each instance takes dp * tp ports, so bases on one host are that far apart.
    """
    taken: dict[str, set[int]] = {}
    for instance in deployment.instances():
        if port_number(instance.port):
            taken.setdefault(instance.host, set()).add(int(instance.port))
    ports: dict[str, int] = {}
    for pair in deployment.pairs:
        first = pair.prefill
        # the store's instances meet in the store, not through a bootstrap server
        if first is None or first.connector == STORE:
            continue
        width = 1 if has("bootstrap_server", target) else ranks(first)
        used = taken.setdefault(first.host, set())
        port = _wanted(first) or BOOTSTRAP_PORT
        while any(number in used for number in range(port, port + width)):
            port += 1
        used.update(range(port, port + width))
        ports[first.name] = port
    return ports


def ranks(instance: Instance) -> int:
    """Workers of an instance; not more than MAX_RANKS, whatever a file says."""
    product = instance.tensor_parallel_size * instance.pipeline_parallel_size * instance.data_parallel_size
    return min(product, MAX_RANKS)


def _wanted(instance: Instance) -> int | None:
    return port_number(instance.variable("VLLM_MOONCAKE_BOOTSTRAP_PORT"))


def plan(instances: Sequence[V1Instance], deployment: Deployment, target: str) -> list[PortRow]:
    """Rows for every instance, in their order."""
    proxies = ("proxy",)
    rows: list[PortRow] = []
    peers = _peers(deployment)
    for item in instances:
        original = item.original
        host = original.host
        rows.append(
            PortRow(
                item.name, host, "API (HTTP)", original.port, original.arguments.value("--host") or "0.0.0.0", proxies
            )
        )
        if original.role == "plain":
            continue
        others = peers.get(item.name, ())
        if item.bootstrap_port is not None:
            rows += _producer_rows(item, others, target)
        rpc = _range(original, "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT")
        rows.append(
            PortRow(item.name, host, "Mooncake RPC, one random port per worker", rpc, host or "VLLM_HOST_IP", others)
        )
        if _protocol(item) == "rdma":
            rows.append(
                PortRow(
                    item.name,
                    host,
                    "RDMA queue pairs",
                    "RoCE: UDP 4791 (switches, security groups)",
                    "network card",
                    others,
                )
            )
    return rows


def _producer_rows(item: V1Instance, others: tuple[str, ...], target: str) -> list[PortRow]:
    host, port = item.original.host, item.bootstrap_port or BOOTSTRAP_PORT
    if has("bootstrap_server", target):
        zmq = f"{ZMQ_RANGE[0]}-{ZMQ_RANGE[1]}"
        return [
            PortRow(item.name, host, "bootstrap (HTTP, no authentication)", str(port), "0.0.0.0", (*others, "proxy")),
            PortRow(item.name, host, "ZeroMQ, one random port per worker", zmq, host or "VLLM_HOST_IP", others),
        ]
    last = port + ranks(item.original) - 1
    use = "ZeroMQ: base + dp_rank * tp_size + tp_rank"
    return [
        PortRow(item.name, host, use, f"{port}-{last}" if last > port else str(port), host or "VLLM_HOST_IP", others)
    ]


def _range(instance: Instance, low: str, high: str) -> str:
    return f"{instance.variable(low) or RPC_RANGE[0]}-{instance.variable(high) or RPC_RANGE[1]}"


def _protocol(item: V1Instance) -> str:
    return "tcp" if '"mooncake_protocol":"tcp"' in item.kv_transfer_config() else "rdma"


def _peers(deployment: Deployment) -> dict[str, tuple[str, ...]]:
    """Instance name -> hosts of the other side; V1 lets every decode instance of a model pull from every prefill one."""
    peers: dict[str, tuple[str, ...]] = {}
    for pair in deployment.pairs:
        for one, other in ((pair.prefill, pair.decode), (pair.decode, pair.prefill)):
            if one is not None and other is not None:
                peers[one.name] = (other.host or other.name,)
    return peers


def firewall(rows: Sequence[PortRow], proxy_host: str) -> list[str]:
    """nft lines per host: each port for the peers that need it, then a drop for everybody else.

    A name that is no address stays in a comment, because nft takes addresses only.
    """
    lines: list[str] = []
    for host in dict.fromkeys(row.host for row in rows):
        own = [row for row in rows if row.host == host and row.ports[:1].isdigit()]
        ports: dict[str, list[str]] = {}
        for row in own:
            for peer in row.peers:
                address = proxy_host if peer == "proxy" else peer
                ports.setdefault(row.ports, [])
                if address not in ports[row.ports]:
                    ports[row.ports].append(address)
        lines.append(f"# on {host or 'a host that is not known'}")
        for port, addresses in ports.items():
            lines += [_accept(address, port, host) for address in addresses]
        lines += [f"nft add rule inet filter input tcp dport {port} drop" for port in ports]
    return lines


def _accept(address: str, port: str, own: str) -> str:
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        shown = address if address and address != "proxy" else "HOST-OF-THE-PROXY"
        return f"# resolve {shown} first: nft add rule inet filter input ip saddr {shown} tcp dport {port} accept"
    if address in ("127.0.0.1", "::1") or address == own:
        return f'nft add rule inet filter input iifname "lo" tcp dport {port} accept'
    return f"nft add rule inet filter input {'ip6' if version == 6 else 'ip'} saddr {address} tcp dport {port} accept"
