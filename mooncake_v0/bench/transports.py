"""Which ways of moving an entry this installation has, and what `--transport` may ask of the agents.

The agents choose; the benchmark only asks. An installation without a `TRANSPORTS` tuple beside AgentSettings has the
engine alone. One with it takes the name in AgentSettings.transport, and each agent tells in Status.transport what it uses.
"""

from __future__ import annotations

from dataclasses import fields, replace

from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.transfer import agent_settings
from mooncake_v0.transfer.agent_settings import AgentSettings
from mooncake_v0.transfer.messages import Status

AUTO, ENGINE, SHM, CUDA_IPC = "auto", "engine", "shm", "cuda_ipc"
NAMES = (AUTO, ENGINE, SHM, CUDA_IPC)
MAPPED = (SHM, CUDA_IPC)  # the consumer maps the producer's pool: its own copy is the one into the paged cache


def available() -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(agent_settings, "TRANSPORTS", (ENGINE,))
    return tuple(name for name in names if name != AUTO)


def check_available(name: str) -> None:
    """CouldNotCheckError if this installation has no such transport."""
    if name != AUTO and name not in available():
        raise CouldNotCheckError(
            f"transport {name!r} is not available in this installation, which has {', '.join(available())}",
            fix=f"use --transport {AUTO} or {available()[0]}, or update mooncake-v0",
        )


def with_transport(settings: AgentSettings, name: str) -> AgentSettings:
    """The settings that ask for this transport."""
    check_available(name)
    if "transport" not in {field.name for field in fields(AgentSettings)}:
        return settings
    changes = {"transport": name}
    return replace(settings, **changes)  # type: ignore[arg-type]


def in_use(status: Status) -> str:
    """What an agent says it uses; without a word of it, the engine."""
    return getattr(status, "transport", None) or ENGINE
