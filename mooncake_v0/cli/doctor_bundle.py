"""The support bundle of `mooncake-v0 doctor --bundle`: a .tar.gz of small text files, every one with secrets masked."""

from __future__ import annotations

import importlib.metadata
import io
import json
import platform
import sys
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Mapping, Sequence

from mooncake_v0 import __version__
from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.migrate.secrets import Secrets, is_secret_name, masked_value

if TYPE_CHECKING:
    from mooncake_v0.doctor.report import Result

LOG_TAIL_BYTES = 1 << 20
FOLDER = "mooncake-v0-support"
# what of the environment says something about a pair; the rest is nobody's business
PREFIXES = (
    "MC_",
    "MOONCAKE",
    "VLLM",
    "CUDA",
    "NCCL",
    "TORCH",
    "OMP_",
    "HF_",
    "RAY_",
    "NO_PROXY",
    "HTTP_PROXY",
    "HTTPS_PROXY",
)
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PATH", "PYTHONPATH", "VIRTUAL_ENV", "ALL_PROXY")


def write_bundle(
    path: Path, results: Sequence[Result], config_path: str | None, logs: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Write the bundle. Raises CouldNotCheckError if a log cannot be read or the bundle cannot be written."""
    texts = {
        "doctor.json": json.dumps([result.as_dict() for result in results], indent=2),
        "packages.txt": _packages(),
        "system.txt": _system(),
        "environment.txt": _environment(environment),
    }
    if config_path is not None:
        texts["mooncake.json"] = _tail(config_path)
    for number, log in enumerate(logs):
        texts[f"logs/{number}-{Path(log).name}"] = _tail(log)
    secrets = Secrets()
    for text in texts.values():
        secrets.scan(text)
    for name, value in environment.items():
        if is_secret_name(name):
            secrets.add(value)
    try:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in texts.items():
                _add(archive, name, secrets.mask(text))
    except OSError as error:
        raise CouldNotCheckError(
            f"{path} cannot be written: {error.strerror}", fix="name a file in a folder of yours"
        ) from error


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode("utf-8", "replace")
    item = tarfile.TarInfo(f"{FOLDER}/{name}")
    item.size, item.mtime = len(data), int(time.time())
    archive.addfile(item, io.BytesIO(data))


def _packages() -> str:
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    return "\n".join(f"{name}=={version}" for name, version in sorted(found.items(), key=lambda item: item[0].lower()))


def _system() -> str:
    lines = [
        f"mooncake-v0 {__version__}",
        f"Python {sys.version}",
        sys.executable,
        platform.platform(),
        platform.machine(),
    ]
    for file in ("/etc/os-release", "/proc/meminfo", "/proc/loadavg", "/proc/net/sockstat"):
        if Path(file).is_file():
            lines += ["", f"{file}:", Path(file).read_text(errors="replace").strip()]
    return "\n".join(lines)


def _environment(environment: Mapping[str, str]) -> str:
    chosen = {n: v for n, v in environment.items() if n.upper().startswith(PREFIXES) or n.upper() in NAMES}
    return "\n".join(f"{name}={masked_value(name, value)}" for name, value in sorted(chosen.items()))


def _tail(path: str) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, io.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CouldNotCheckError(f"{path} cannot be read: {reason}", fix="name a readable file") from error
