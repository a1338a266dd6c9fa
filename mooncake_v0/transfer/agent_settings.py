"""What a worker tells its agent at the start; JSON on the agent's standard input."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from mooncake_v0.config.model import Endpoint, MooncakeConfig, RankPorts, Role

AUTO, ENGINE, SHM, CUDA_IPC = "auto", "engine", "shm", "cuda_ipc"
TRANSPORTS = (AUTO, ENGINE, SHM, CUDA_IPC)
ON, OFF = "on", "off"
CHECKSUMS = (AUTO, ON, OFF)


@dataclass(frozen=True)
class AgentSettings:
    """Everything an agent is told at its start.

    fingerprint: what both sides' models must agree on
    transport:   AUTO maps the peer's pool where both sides are on one host, SHM also says so where it cannot, ENGINE never
                 does; CUDA_IPC has prefill's pool in device memory, for a decode on the same host, and nothing else
    device_handle: of a pool in device memory, hexadecimal; empty for one in host memory
    checksum:    auto, on or off, see `transfer.checksums`
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
