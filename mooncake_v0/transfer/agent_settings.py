"""What a worker tells its agent at the start; JSON on the agent's standard input."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from mooncake_v0.config.model import MAX_RANKS, Endpoint, MooncakeConfig, RankPorts, Role

AUTO, ENGINE, SHM, CUDA_IPC = "auto", "engine", "shm", "cuda_ipc"
TRANSPORTS = (AUTO, ENGINE, SHM, CUDA_IPC)
ON, OFF = "on", "off"
CHECKSUMS = (AUTO, ON, OFF)
ONE, TWO = "1", "2"
READERS = (AUTO, ONE, TWO)
MIN_CPUS_FOR_TWO_READERS = 8  # a read burns two cores, one that waits and one that copies


@dataclass(frozen=True)
class AgentSettings:
    """Everything an agent is told at its start.

    fingerprint: what both sides' models must agree on
    transport:   AUTO maps the peer's pool where both sides are on one host, SHM also says so where it cannot, ENGINE never
                 does; CUDA_IPC has prefill's pool in device memory, for a decode on the same host, and nothing else
    device_handle: of a pool in device memory, hexadecimal; empty for one in host memory
    checksum:    auto, on or off, see `transfer.checksums`
    readers:     of decode with tcp, how many read at the same time: auto, 1 or 2
    """

    role: Role
    rank: int
    tp_size: int
    config: MooncakeConfig
    fingerprint: dict[str, str]
    pool_nbytes: int
    ttl_s: float = 480.0
    secret_file: str | None = None
    log_level: str = "INFO"
    api_url: str | None = None
    transport: str = AUTO
    checksum: str = AUTO
    readers: str = AUTO
    device_handle: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentSettings:
        raw = json.loads(text)
        config = raw.pop("config")
        for side in ("prefill", "decode"):
            config[side] = Endpoint(**config[side])
        config["device_names"] = tuple(config["device_names"])
        return cls(config=MooncakeConfig(**config), **raw)

    @property
    def peer_role(self) -> Role:
        return "decode" if self.role == "prefill" else "prefill"

    @property
    def ports(self) -> RankPorts:
        return self.config.ports(self.role, self.rank)

    @property
    def second_reader_ports(self) -> RankPorts | None:
        """Where a second engine listens, for nobody, if decode is to have one: on the engine ports of rank + 8."""
        is_possible = self.role == "decode" and self.config.protocol == "tcp" and self.transport != CUDA_IPC
        if not is_possible or self.readers == ONE or self.tp_size > MAX_RANKS // 2:
            return None
        if self.readers == AUTO and len(os.sched_getaffinity(0)) < MIN_CPUS_FOR_TWO_READERS:
            return None
        return self.config.ports(self.role, self.rank + MAX_RANKS // 2)
