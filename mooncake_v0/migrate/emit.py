"""Writes V1 launch files in the shape of the originals (`--emit DIR`), each with its reasons as comments.

Scripts for shells, docker run and Slurm; one compose file; manifests; units; a supervisord file; the proxy in the same
shape. Called by the command line. Text of the input only ever lands inside quotes; secrets become references to variables
that the operator sets.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Callable, Sequence

from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.migrate.convert import V1Instance
from mooncake_v0.migrate.emit_containers import compose_file, docker_script, dockerfile, manifest_files
from mooncake_v0.migrate.emit_services import supervisord_file, unit_file
from mooncake_v0.migrate.emit_text import exports, header, script_command, with_secrets_referenced
from mooncake_v0.migrate.facts import has
from mooncake_v0.migrate.proxy_plan import ProxyPlan
from mooncake_v0.migrate.report import Migration

CONTAINERS = frozenset(["docker", "compose", "kubernetes"])


def emit(migration: Migration, folder: Path, *, force: bool = False) -> list[str]:
    """Write the files; returns their paths. CouldNotCheckError if one is there already and differs, unless forced."""
    files = {name: migration.secrets.mask(text) for name, text in launch_files(migration).items()}
    for name, text in files.items():
        path = folder / name
        if path.exists() and not force and path.read_text(encoding="utf-8", errors="replace") != text:
            raise CouldNotCheckError(f"{path} exists and differs", fix="choose an empty folder or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            if name.endswith((".sh", ".sbatch")):
                (folder / name).chmod(0o755)
    except OSError as error:
        raise CouldNotCheckError(f"cannot write to {folder}: {error.strerror}", fix="choose another folder") from error
    return [posixpath.join(folder.as_posix(), name) for name in files]


def launch_files(migration: Migration) -> dict[str, str]:
    """File name -> text, in the order of the instances."""
    target, proxy = migration.report.target, migration.report.proxy
    files: dict[str, str] = {}
    by_shape: dict[str, list[V1Instance]] = {}
    for item in migration.instances:
        by_shape.setdefault(item.original.invocation.shape.launcher, []).append(with_secrets_referenced(item))
    for launcher, items in by_shape.items():
        files.update(_WRITERS.get(launcher, _scripts)(items, target, proxy))
    if CONTAINERS & set(by_shape):
        files["Dockerfile.v1"] = dockerfile(target)
    return files


def _scripts(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> dict[str, str]:
    files = {f"{item.name}.sh": _script(item, target) for item in items}
    return {**files, **_proxy_script(proxy, target)}


def _script(item: V1Instance, target: str) -> str:
    lines = ["#!/usr/bin/env bash", *header(item, target), "set -euo pipefail", *exports(item.env)]
    return "\n".join([*lines, "exec " + script_command(item.argv), ""])


def _slurm(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> dict[str, str]:
    files = {}
    for item in items:
        directives = item.original.invocation.shape.document or []
        lines = ["#!/bin/bash", *directives, *header(item, target), "set -euo pipefail", *exports(item.env)]
        files[f"{item.name}.sbatch"] = "\n".join([*lines, "srun " + script_command(item.argv), ""])
    return {**files, **_proxy_script(proxy, target)}


def _docker(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> dict[str, str]:
    files = {f"{item.name}.docker.sh": docker_script(item, target) for item in items}
    return {**files, **_proxy_script(proxy, target)}


def _compose(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> dict[str, str]:
    return {"docker-compose.v1.yaml": compose_file(items, target, proxy)}


def _units(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> dict[str, str]:
    files = {f"vllm-{item.name}.service": unit_file(item, target) for item in items}
    return {**files, **_proxy_script(proxy, target)}


def _supervisord(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> dict[str, str]:
    return {"supervisord.v1.conf": supervisord_file(items, target), **_proxy_script(proxy, target)}


def _proxy_script(proxy: ProxyPlan | None, target: str) -> dict[str, str]:
    if proxy is None:
        return {}
    lines = ["#!/usr/bin/env bash", f"# proxy for vLLM {target}; its file comes from {proxy.origin}"]
    lines += [f"# {note}" for note in proxy.notes]
    if has("bootstrap_server", target):
        lines.append("# with an API key on the instances: export OPENAI_API_KEY before starting this")
    files = {}
    for number, argv in enumerate(proxy.argvs, 1):
        name = "proxy.sh" if len(proxy.argvs) == 1 else f"proxy-{number}.sh"
        files[name] = "\n".join([*lines, "set -euo pipefail", "exec " + script_command(argv), ""])
    return files


_WRITERS: dict[str, Callable[[Sequence[V1Instance], str, ProxyPlan | None], dict[str, str]]] = {
    "compose": _compose,
    "docker": _docker,
    "kubernetes": manifest_files,
    "slurm": _slurm,
    "supervisord": _supervisord,
    "systemd": _units,
}
