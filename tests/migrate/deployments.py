"""The deployments under `fixtures/`, each with the target and hardware it is reported for."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, Mapping

from mooncake_v0.migrate.convert import V1Instance
from mooncake_v0.migrate.report import Migration, build

FIXTURES = Path(__file__).parent / "fixtures"
NEWEST = "0.33.0"
DOCUMENTED = ("shell", "runbook", "docker", "compose", "kubernetes", "helm", "systemd", "supervisord", "slurm")


@dataclass(frozen=True)
class Options:
    target: str = NEWEST
    hardware: Mapping[str, str] = field(default_factory=dict)


_OPTIONS = {
    "old-gpu": Options(hardware={"gpu": "V100", "driver": "535", "cuda": "12.4", "python": "3.9"}),
    "tensor-parallel-8": Options(hardware={"gpu": "H100", "driver": "580", "cuda": "13", "python": "3.12"}),
    "tensor-parallel-differs": Options(target="0.18.0"),
    "pipeline-parallel": Options(target="0.22.0"),
    "toy-proxy-old-target": Options(target="0.15.1"),
    "documented-tcp": Options(target="0.13.0"),
    "awq-fp8-cache": Options(target="0.25.0"),
}
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


@contextlib.contextmanager
def beside_fixtures() -> Iterator[None]:
    """Reports name files as they were given: relative to the fixtures."""
    before = Path.cwd()
    os.chdir(FIXTURES)
    try:
        yield
    finally:
        os.chdir(before)


@functools.cache
def migration(name: str, target: str = "") -> Migration:
    """The report of one fixture, for its own target or another."""
    options = _OPTIONS.get(name, Options())
    with beside_fixtures():
        return build([name], target or options.target, options.hardware)


def instances(target: str = "") -> list[tuple[str, V1Instance]]:
    """("fixture/instance", instance) for all instances of all fixtures."""
    return [(f"{name}/{item.name}", item) for name in NAMES for item in migration(name, target).instances]
