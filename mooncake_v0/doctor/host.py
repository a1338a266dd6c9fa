"""What the checks may look at, in one value, so that a test can hand them a crafted host. No caching, no privileges."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Optional, Sequence

from mooncake_v0.config.model import MooncakeConfig, Role

CHILD_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Done:
    """A finished child process: its exit code (negative: the signal), and the end of its output, both streams."""

    code: int
    output: str


@dataclass(frozen=True)
class Host:
    """One host and what the user said about the deployment.

    config: the valid mooncake.json, if one was given, and its path; role: the side this host is, if known
    local: the sides whose address is this host's; resolved: host as written -> IPv4 address
    running: the local sides whose agents answer, so that their ports and memory are taken by right
    api_port, ranks, gpu_memory_utilization, kv_buffer_bytes: as given to vLLM
    proc, sys: roots of procfs and sysfs; python: the interpreter that runs vLLM here
    """

    config: MooncakeConfig | None = None
    config_path: str = "mooncake.json"
    role: Role | None = None
    local: tuple[Role, ...] = ()
    resolved: Mapping[str, Optional[str]] = field(default_factory=dict)
    running: tuple[Role, ...] = ()
    ranks: int = 1
    gpu_memory_utilization: float = 0.9
    kv_buffer_bytes: int = 2_000_000_000
    timeout_s: float = 3.0
    secret: bytes | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    python: str = field(default_factory=lambda: sys.executable)

    def version(self, package: str) -> str | None:
        """The installed version of a package; None without it."""
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def module_folder(self, name: str) -> Path | None:
        """Where a top-level package is installed, found without importing it."""
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None

    def run(self, command: Sequence[str], timeout_s: float = CHILD_TIMEOUT_S) -> Done:
        """Run a child with this environment. Raises OSError if it cannot start, TimeoutExpired if it does not end."""
        done = subprocess.run(
            command,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        return Done(done.returncode, done.stdout.decode("utf-8", "replace")[-4000:])
