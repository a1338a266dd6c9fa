"""Make the pinned environment and put this checkout into it. Standard library only: it runs before anything is installed.

    python3 -m mooncake_v0.pin.environment          → .venv in the checkout; prints what it does
    python3 -m mooncake_v0.pin.environment --key    → the name of the cached environment, and nothing else

The heavy part (torch, vLLM, the engine: about 5 GB) is made once under ~/.cache/mooncake-v0 and named after what it is
made from: the constraints, this file, the wheel builder, Python and the kind of machine. The checkout's .venv holds
nothing but a link to it and the package itself in editable form. On a machine with an NVIDIA GPU it is vLLM's own wheel, on
others the CPU build. Safe to run twice at once, and after an interrupted run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Iterator

from mooncake_v0 import VLLM_VERSION

CHECKOUT = Path(__file__).resolve().parents[2]
CONSTRAINTS = CHECKOUT / "configs" / f"constraints-vllm-{VLLM_VERSION}.txt"
TEST_CONSTRAINTS = CHECKOUT / "configs" / "constraints-tests.txt"
ONLY_WITH_GPU = ("xformers",)
_SOURCES = (CONSTRAINTS, TEST_CONSTRAINTS, Path(__file__), Path(__file__).with_name("cpu_wheel.py"))


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is not None


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "mooncake-v0"


def environment_name() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(source.read_bytes())
    digest.update(f"{sys.version_info[:3]} {sys.base_prefix} {platform.machine()}".encode())
    return f"pin-{'gpu' if has_gpu() else 'cpu'}-py{sys.version_info[0]}{sys.version_info[1]}-{digest.hexdigest()[:12]}"


def make_pin() -> Path:
    """The cached environment, made if it is not there; returns its folder."""
    folder = cache_folder() / environment_name()
    if (folder / "complete").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock")):
        if not (folder / "complete").exists():
            _build(folder)
    return folder


def _build(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _say(f"making the pinned environment in {folder} (once; about ten minutes on two cores)")
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    python = str(folder / "bin" / "python")
    _step("newer pip", [python, "-m", "pip", "install", "-q", "-U", "pip"])
    names = [line.split("#")[0].strip() for file in (CONSTRAINTS, TEST_CONSTRAINTS) for line in file.open()]
    wanted = [name for name in names if name and (has_gpu() or not name.startswith(ONLY_WITH_GPU))]
    # the list is complete, so nothing needs to be resolved
    _step(f"{len(wanted)} packages", [python, "-m", "pip", "install", "-q", "--no-deps", *wanted])
    if has_gpu():
        _step(f"vllm {VLLM_VERSION}", [python, "-m", "pip", "install", "-q", "--no-deps", f"vllm=={VLLM_VERSION}"])
    else:
        wheels = folder / "wheels"
        _step("CPU build of vLLM", [python, "-m", "mooncake_v0.pin.cpu_wheel", str(wheels)])
        wheel = next(wheels.glob("vllm-*.whl"))
        _step(f"{wheel.name}", [python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)])
    (folder / "complete").touch()


def link_checkout(pin: Path) -> Path:
    """.venv in the checkout: the pin's packages by reference, this package in editable form; returns its python."""
    folder = CHECKOUT / ".venv"
    mark = folder / "pin"
    python = folder / "bin" / "python"
    recipe = str(pin) + hashlib.sha256((CHECKOUT / "setup.cfg").read_bytes()).hexdigest()
    with _lock(CHECKOUT / ".venv.lock"):
        if mark.exists() and mark.read_text() == recipe:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        site = next(folder.glob("lib/python*/site-packages"))
        pin_site = next(pin.glob("lib/python*/site-packages"))
        (site / "_pin.pth").write_text(f"import site; site.addsitedir({str(pin_site)!r})\n")
        _step(
            "this checkout",
            [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(CHECKOUT)],
        )
        mark.write_text(recipe)
    return python


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _step(what: str, command: list[str]) -> None:
    """Run one installation step; its output is shown only when it fails."""
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        _say(done.stdout)
        raise SystemExit(f"error: installing {what} failed with exit code {done.returncode}: {' '.join(command[:6])} …")
    _say(f"  {what}: {time.monotonic() - started:.0f} s")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
    if argv == ["--key"]:
        print(environment_name())
        return
    link_checkout(make_pin())


if __name__ == "__main__":
    main(sys.argv[1:])
