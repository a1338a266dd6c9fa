"""The valid configuration as frozen data, and all port arithmetic.

`load` builds a `MooncakeConfig` once the findings allow it; the plugin, the agents, `ports` and `launch` read it. Port
plan for rank r and base = the port in prefill_url or decode_url (after the +100 for equal URLs):

    base + 2r        engine handshake (MC_LEGACY_RPC_PORT_BINDING=1 makes the engine bind the configured host:port)
    base + 2r + 1    engine data (the engine always takes handshake + 1)
    base + 32 + r    side channel

All within base .. base+47, which is what the documented "at least 50 apart on one host" protects.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

MAX_RANKS = 16
PORT_SPAN = 48
EQUAL_URL_OFFSET = 100
SIDE_CHANNEL_OFFSET = 32


@dataclass(frozen=True)
class Endpoint:
    """host:port of an engine; the host as written, without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class RankPorts:
    """The three ports that one rank of one side binds."""

    host: str
    handshake: int
    data: int
    side_channel: int

    @property
    def segment_name(self) -> str:
        """The engine's name for this rank: host:handshake port, which legacy binding also binds."""
        return f"{self.host}:{self.handshake}"


def rank_ports(endpoint: Endpoint, rank: int) -> RankPorts:
    """The port plan's row for one rank; rank is 0..15."""
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank} is outside 0..{MAX_RANKS - 1}")
    base = endpoint.port
    return RankPorts(endpoint.host, base + 2 * rank, base + 2 * rank + 1, base + SIDE_CHANNEL_OFFSET + rank)


@dataclass(frozen=True)
class MooncakeConfig:
    """A checked mooncake.json. Endpoints are final: the +100 for equal URLs has been applied.

    metadata_server is a URL with its scheme (http, https, etcd, etcds, redis, rediss); device_names is empty for tcp.
    """

    prefill: Endpoint
    decode: Endpoint
    metadata_server: str
    protocol: Literal["tcp", "rdma"]
    device_names: tuple[str, ...] = ()

    def endpoint(self, role: Role) -> Endpoint:
        return self.prefill if role == "prefill" else self.decode

    def ports(self, role: Role, rank: int) -> RankPorts:
        return rank_ports(self.endpoint(role), rank)

    def digest(self) -> str:
        """Hash of what both sides must agree on; the handshake compares it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def final_endpoints(prefill: Endpoint, decode: Endpoint) -> tuple[Endpoint, Endpoint]:
    """Apply the documented rule: equal URLs move decode's port by +100, once."""
    if prefill == decode:
        decode = Endpoint(decode.host, decode.port + EQUAL_URL_OFFSET)
    return prefill, decode
