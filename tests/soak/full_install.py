"""The full install as the README writes it, into an environment with nothing in it, and what an operator tries first there.

    python -m tests.soak.full_install [--python PYTHON] [--into FOLDER]

Builds the wheel, makes a virtual environment of that Python (this one's by default) in FOLDER (a temporary one by default,
removed afterwards), and runs `pip install -c configs/constraints-….txt "mooncake_v0-….whl[vllm]"` in it: the CUDA wheels,
about 3 GB to load and 8 GB on disk. Then: every package that pip took must have its version in the constraints, `pip
check` must be content, `mooncake-v0 --version` must name the pins, vLLM's server must list --kv-transfer-config in its
--help, doctor must find nothing wrong, and every module of vLLM that a server may import must be importable. No GPU is
needed. Prints one line a step; exit code 1 if one fails. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Iterator

from mooncake_v0 import ENGINE_VERSIONS, VLLM_VERSION, __version__
from mooncake_v0.pin.environment import CONSTRAINTS
from tests.documents import ROOT

# what pip and venv bring themselves, and what the command line names instead of the constraints
NOT_PINNED = {"pip", "setuptools", "mooncake-v0", "vllm"}


class Failed(Exception):
    """A step did not show what it must."""


def normal(name: str) -> str:
    """A package's name as PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Package -> version, of a constraints file."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def untested(installed: dict[str, str], tested: dict[str, str]) -> list[str]:
    """What pip took in a version that the constraints do not name."""
    wrong = {name: version for name, version in installed.items() if normal(name) not in NOT_PINNED}
    return [f"{name} {version}" for name, version in wrong.items() if tested.get(normal(name)) != version]


class Environment:
    """A virtual environment, and its commands as its user types them: with nothing of this checkout in sight."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.folder = folder

    def run(self, *words: str, timeout_s: float = 300) -> str:
        """The command's output, both streams. Raises Failed when it ends with another exit code than 0."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment = {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise Failed(f"{' '.join(words[:4])} ends with {done.returncode}:\n{done.stdout[-3000:]}")
        return done.stdout


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder / f"mooncake_v0-{__version__}-py3-none-any.whl"


def install(environment: Environment, wheel: Path) -> str:
    environment.run("pip", "install", "-c", str(CONSTRAINTS), f"{wheel}[vllm]", timeout_s=7200)
    size = sum(
        file.stat().st_size for file in environment.folder.rglob("*") if file.is_file() and not file.is_symlink()
    )
    return f"{size / 1e9:.1f} GB"


def check_versions(environment: Environment) -> str:
    rows = json.loads(environment.run("pip", "list", "--format", "json", "--disable-pip-version-check"))
    installed = {row["name"]: row["version"] for row in rows}
    wrong = untested(installed, pins(CONSTRAINTS.read_text()))
    if wrong:
        raise Failed(f"not in the constraints: {', '.join(wrong)}")
    return f"{len(installed)} packages, each at its tested version"


def check_requirements(environment: Environment) -> str:
    return environment.run("pip", "check").strip()


def check_version_command(environment: Environment) -> str:
    shown = environment.run("mooncake-v0", "--version")
    for wanted in (
        f"mooncake-v0 {__version__}",
        f"vllm {VLLM_VERSION} ",
        f"mooncake-transfer-engine {ENGINE_VERSIONS[-1]} ",
    ):
        if wanted not in shown:
            raise Failed(f"{wanted!r} is not in:\n{shown}")
    return shown.replace("\n", "; ").strip("; ")


def check_server_help(environment: Environment) -> str:
    shown = environment.run("python", "-m", "vllm.entrypoints.openai.api_server", "--help")
    if "--kv-transfer-config" not in shown:
        raise Failed(f"vLLM's help does not name --kv-transfer-config:\n{shown[-2000:]}")
    return "vLLM's server takes --kv-transfer-config"


def check_doctor(environment: Environment) -> str:
    results = json.loads(environment.run("mooncake-v0", "doctor", "--format", "json"))["results"]
    wrong = [f"{row['check']}: {row['what']}" for row in results if row["status"] in ("error", "warning")]
    # of this machine, and no matter of the install
    wrong = [line for line in wrong if not line.startswith(("memory-kills", "gpu-memory"))]
    if wrong:
        raise Failed("\n".join(wrong))
    return f"doctor: {sum(row['status'] == 'ok' for row in results)} right, nothing wrong"


# what vLLM imports for hardware that is not NVIDIA's, and what it says on a machine without a GPU
OTHER_HARDWARE = ("openvino", "habana_frameworks", "torch_xla", "transformers_neuronx", "vllm_hpu_extension")
OTHER_HARDWARE += ("intel_extension_for_pytorch", "NVML Shared Library Not Found", "Found no NVIDIA driver")
IMPORTS = """
import importlib, pkgutil
from mooncake_v0.vllm_plugin.guided_decoding import provide_airports
provide_airports()
parts = "engine executor entrypoints worker model_executor.guided_decoding transformers_utils attention"
for part in parts.split():
    folder = importlib.import_module("vllm." + part).__path__
    for module in pkgutil.walk_packages(folder, f"vllm.{part}."):
        try:
            importlib.import_module(module.name)
            print("imported", module.name)
        except BaseException as error:
            print("failed", module.name, type(error).__name__, str(error)[:200].replace("\\n", " "))
"""


def check_imports(environment: Environment) -> str:
    """Every module that a server may import, later than at its start too: guided decoding, ray, tokenizers, parsers.

    pip's word is not enough: a pyarrow that wants NumPy 2 has broken guided decoding without `pip check` knowing it.
    """
    lines = environment.run("python", "-c", IMPORTS).splitlines()
    failed = [line for line in lines if line.startswith("failed") and not any(word in line for word in OTHER_HARDWARE)]
    if failed:
        raise Failed("\n".join(failed))
    return f"{sum(line.startswith('imported') for line in lines)} modules of vLLM can be imported"


CHECKS: tuple[Callable[[Environment], str], ...] = (
    check_versions,
    check_requirements,
    check_version_command,
    check_server_help,
    check_doctor,
    check_imports,
)


@contextlib.contextmanager
def place(into: Path | None) -> Iterator[Path]:
    """The folder for the environment; a temporary one goes away again."""
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        yield into
        return
    with tempfile.TemporaryDirectory(prefix="mooncake-v0-full-") as folder:
        yield Path(folder)


def try_step(name: str, step: Callable[[], str]) -> bool:
    started = time.monotonic()
    try:
        shown, word = step(), "ok"
    except (Failed, subprocess.SubprocessError) as error:
        shown, word = str(error), "FAILED"
    print(f"{word:<6} {name:<22} {time.monotonic() - started:4.0f} s  {shown}", flush=True)
    return word == "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment (3.11 or 3.12)")
    parser.add_argument(
        "--into", type=Path, help="folder for the environment, which stays; one that is there is tried again"
    )
    arguments = parser.parse_args()
    with place(arguments.into) as folder:
        environment = Environment(folder / "venv")
        if not environment.bin.exists():
            subprocess.run([arguments.python, "-m", "venv", str(environment.folder)], check=True, timeout=300)
        wheel = build_wheel(folder / "dist")
        if not try_step("install", lambda: install(environment, wheel)):
            return 1
        done = [
            try_step(check.__name__[6:].replace("_", " "), lambda check=check: check(environment))  # type: ignore[misc]
            for check in CHECKS
        ]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
