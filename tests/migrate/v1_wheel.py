"""The real vLLM 0.33.0 argument parser and KVTransferConfig for tests, in an environment of their own.

`environment()` gives a folder under ~/.cache/mooncake-v0 whose name is a hash of all that goes into it, building it if it
is not there: the wheel comes by `pip download --no-deps` (336 MB), only its Python files are
kept (57 MB), and a few small libraries are installed beside them. `Parser` runs `v1_driver` in a process that sees nothing
else. torch and whatever else is missing is stood in for by `stand_ins`.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

VLLM = "vllm==0.33.0"
LIBRARIES = (
    "annotated-types==0.8.0",
    "cachetools==8.0.2",
    "cloudpickle==3.1.3",
    "msgspec==0.23.0",
    "numpy==2.3.5",
    "packaging==26.4",
    "psutil==7.2.2",
    "pydantic==2.14.4",
    "pydantic_core==2.50.5",
    "PyYAML==6.0.4",
    "regex==2026.11.19",
    "typing-inspection==0.4.5",
    "typing_extensions==4.16.0",
)
HERE = Path(__file__).parent
DEADLINE_S = 60


def environment() -> Path:
    """The folder with `site` and `wheel`, built if needed; safe when two runs build at once."""
    what = json.dumps([VLLM, LIBRARIES, sys.version_info[:2], sys.platform])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake-v0"
    folder = cache / f"v1-parser-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="v1-parser-building-", dir=cache))
        try:
            _build(building)
            building.rename(folder)
        except OSError:
            # another run was faster, or the build failed: only the first leaves a folder
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _build(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    download = [*pip, "download", *quiet, "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        subprocess.run([*download, "--dest", wheels, VLLM], check=True, timeout=600)
        [wheel] = Path(wheels).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))]
            archive.extractall(folder / "wheel", names)
    install = [*pip, "install", *quiet, "--no-deps", "--only-binary=:all:", "--target", str(folder / "site")]
    subprocess.run([*install, *LIBRARIES], check=True, timeout=600)


class Parser:
    """A running `v1_driver`; every answer has a deadline."""

    def __init__(self, folder: Path):
        # -S: the tests' own site-packages hold another vLLM
        command = [sys.executable, "-S", str(HERE / "v1_driver.py"), str(folder / "site"), str(folder / "wheel")]
        environ = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environ, cwd=folder
        )
        self.version = self._answer()["version"]

    def parse(self, argv: list[str]) -> dict[str, Any]:
        """`vllm serve` of these words, without the word vllm."""
        return self._ask({"argv": argv})

    def kv_transfer_config(self, text: str) -> dict[str, Any]:
        return self._ask({"kv": text})

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()
        self.errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        selector = selectors.DefaultSelector()
        selector.register(self.process.stdout, selectors.EVENT_READ)
        ready = selector.select(DEADLINE_S)
        selector.close()
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.process.kill()
            self.errors.seek(0)
            raise RuntimeError(f"the parser gave no answer: {self.errors.read().decode(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
