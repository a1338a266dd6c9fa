"""Build a CPU wheel of vLLM 0.6.4.post1 from its PyPI source archive.

Run inside an environment that already holds torch 2.5.1, setuptools, ninja and `unearth`::

    python -m mooncake_v0.pin.cpu_wheel OUTPUT_DIR

vLLM picks its CPU platform when "cpu" is in its version, so the wheel is 0.6.4.post1+cpu. Its own build would fetch
oneDNN from the network and refuse a CUDA torch; seven C++ files compiled for AVX2 are all that its CPU backend needs
(vllm 0.6.4.post1, cmake/cpu_extension.cmake). The archive's SHA-256 is fixed here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mooncake_v0 import VLLM_VERSION
from mooncake_v0.errors import CouldNotCheckError

ARCHIVE_SHA256 = "3cf6fdb46f50fa66cbeec87738e4b91bf2cb086979b4fc74a782cd30f75d1af1"

# Stands in for vLLM's setup.py: same package, CPU extension only.
SETUP_PY = """
import email, pathlib, re
from setuptools import find_packages, setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

info = email.message_from_string(pathlib.Path("PKG-INFO").read_text())
requires = [line for line in pathlib.Path("requirements-common.txt").read_text().splitlines() if line.strip()]
requires = [re.sub(r"\\s*#.*", "", line) for line in requires if not line.startswith("#")]
sources = ["activation", "attention", "cache", "utils", "layernorm", "pos_encoding", "torch_bindings"]
pathlib.Path("vllm/_version.py").write_text(
    f"__version__ = version = {VERSION!r}\\n__version_tuple__ = version_tuple = (0, 6, 4, 'post1', 'cpu')\\n")
setup(
    name="vllm", version=VERSION, license="Apache-2.0", python_requires=">=3.9",
    packages=find_packages(include=["vllm", "vllm.*"]), install_requires=requires + ["torch==2.5.1"],
    package_data={"vllm": ["py.typed", "model_executor/layers/fused_moe/configs/*.json"]},
    entry_points={"console_scripts": ["vllm=vllm.scripts:main"]},
    ext_modules=[CppExtension(
        "vllm._C", [f"csrc/cpu/{name}.cpp" for name in sources],
        include_dirs=[str(pathlib.Path("csrc").resolve())], libraries=["numa"],
        extra_compile_args=["-O3", "-g0", "-fopenmp", "-mf16c", "-mavx2", "-mfma", "-DVLLM_CPU_EXTENSION"],
        py_limited_api=True)],
    cmdclass={"build_ext": BuildExtension},
)
"""


def find_index_url() -> str:
    """The package index that pip is configured for, or pip's default."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    )
    from pip._internal.models.index import PyPI

    return os.environ.get("PIP_INDEX_URL") or asked.stdout.strip() or str(PyPI.simple_url)


def unpack_archive(folder: Path) -> Path:
    """Download, check and unpack the source archive; return its top folder."""
    from unearth import PackageFinder

    finder = PackageFinder(index_urls=[find_index_url()], no_binary=["vllm"])
    best = finder.find_best_match(f"vllm=={VLLM_VERSION}").best
    if best is None:
        raise CouldNotCheckError(
            f"the package index has no source archive of vllm {VLLM_VERSION}", fix="check pip's index-url and network"
        )
    source: Path = finder.download_and_unpack(best.link, folder / "source", folder / "download")
    archive = next((folder / "download").iterdir())
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != ARCHIVE_SHA256:
        raise CouldNotCheckError(
            f"{archive.name} has SHA-256 {digest}, expected {ARCHIVE_SHA256}",
            fix="use an index that serves PyPI's file",
        )
    return source


def build(output: Path) -> Path:
    """Build the wheel into `output` and return its path. Takes one to three minutes on two cores."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mooncake-v0-build-") as scratch:
        source = unpack_archive(Path(scratch))
        (source / "pyproject.toml").unlink()
        (source / "setup.py").write_text(f"VERSION = {VLLM_VERSION + '+cpu'!r}\n" + SETUP_PY)
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(output), str(source)],
            check=True,
        )
    return next(output.glob("vllm-*.whl"))


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
