"""The package as it is released: sdist and wheel, and the light install into bare environments of other Pythons.

The dependencies of the light install are kept beside the pinned environment, one folder for each Python; the wheel itself
is installed afresh.
"""

from __future__ import annotations

import configparser
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from mooncake_v0 import __version__
from mooncake_v0.cli import COMMANDS
from mooncake_v0.pin.environment import CONSTRAINTS, cache_folder
from tests.documents import ROOT, first_json

PYTHONS = ("3.9", "3.10", "3.11", "3.12")


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel; the wheel is built from the sdist, as `python -m build` does."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:]
    (folder / "build.log").write_text(done.stdout)
    return folder


def test_the_build_gives_no_warning(dist: Path) -> None:
    lines = (dist / "build.log").read_text().splitlines()
    # files may be named after warnings
    told = [line for line in lines if not line.startswith(("copying ", "adding ", "running ", "hard linking "))]
    assert [line for line in told if re.search(r"(?i)warning|deprecat", line)] == []


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    return dist / f"mooncake_v0-{__version__}-py3-none-any.whl"


def test_the_wheel_holds_every_module_and_data_file(wheel: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "mooncake_v0"], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert set(tracked.stdout.split()) - held == set()
    assert [name for name in held if name.startswith(("tests/", "configs/"))] == []


def test_the_tested_versions_travel_in_the_wheel_and_the_sdist(dist: Path, wheel: Path) -> None:
    # a link to configs/ in the checkout, so that there is one list; a file in what is released
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("mooncake_v0/doctor/tested_versions.txt") == CONSTRAINTS.read_bytes()
    with tarfile.open(dist / f"mooncake_v0-{__version__}.tar.gz") as archive_:
        names = archive_.getnames()
    for name in (
        "configs/systemd/environment",
        "scripts/test.sh",
        "docs/operating.md",
        "README.zh-CN.md",
        "CHANGELOG.md",
    ):
        assert f"mooncake_v0-{__version__}/{name}" in names


def test_the_sdist_holds_every_file_of_the_tests_and_nothing_that_they_left(dist: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, capture_output=True, text=True, check=True)
    with tarfile.open(dist / f"mooncake_v0-{__version__}.tar.gz") as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    assert {name for name in names if name.startswith("tests/")} >= set(tracked.stdout.split())
    assert [name for name in names if name.endswith(".pyc")] == []


def test_the_version_is_written_once() -> None:
    found = subprocess.run(
        ["git", "grep", "-lF", f'"{__version__}"', "--", "*.py", "*.cfg"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.split() == ["mooncake_v0/__init__.py"]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


# --- light installs ---------------------------------------------------------------------------------------------------


def find_python(version: str) -> str:
    """An interpreter of that version, on the path or among pyenv's."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    known = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    # pyenv's own interpreters first: its python3.x on the path may be a shim that only says "not active"
    found = str(known[-1]) if known else shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"this machine has no Python {version}")
    return found


def requirements() -> list[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config["options"]["install_requires"].split("\n")[1:]


@dataclass(frozen=True)
class Installed:
    """The light install: its interpreter, and the folder with the wheel."""

    python: str
    site: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`mooncake-v0 …` with nothing of the checkout or the pinned environment in sight."""
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.site), "HOME": str(self.site), **variables}
        command = [self.python, "-m", "mooncake_v0", *arguments]
        return subprocess.run(command, cwd=self.site, env=environment, capture_output=True, text=True, timeout=120)


def make_dependencies(python: str) -> Path:
    """An environment with what setup.cfg requires and nothing else; kept, since it takes a while."""
    version = subprocess.run([python, "-VV"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(f"{version}{requirements()}".encode()).hexdigest()[:12]
    folder = cache_folder() / f"light-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=120)
            install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", *requirements()]
            subprocess.run(install, check=True, timeout=280)
            (folder / "complete").touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="session", params=PYTHONS)
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    python = str(make_dependencies(find_python(request.param)))
    site = tmp_path_factory.mktemp(f"site{request.param}")
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    (site / "mooncake.json").write_text(first_json(ROOT / "README.md"))
    return Installed(python, site)


def test_a_light_install_has_neither_torch_nor_vllm_nor_the_engine(installed: Installed) -> None:
    code = "import importlib.util as u; print([n for n in ('torch', 'vllm', 'mooncake') if u.find_spec(n)])"
    done = subprocess.run([installed.python, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]"


def test_every_command_of_a_light_install_starts(installed: Installed) -> None:
    code = "from mooncake_v0.cli import COMMANDS, cli\n"
    code += "for name in COMMANDS:\n    cli([name, '--help'], standalone_mode=False)\n"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed.site)}
    done = subprocess.run([installed.python, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("Usage: ")) == (0, len(COMMANDS)), done.stderr


def test_a_light_install_validates(installed: Installed) -> None:
    done = installed.run("validate", "mooncake.json")
    assert (done.returncode, done.stdout) == (0, "mooncake.json: valid\n"), done.stderr


def test_a_light_install_migrates(installed: Installed) -> None:
    script = installed.site / "start.sh"
    script.write_text(
        "MOONCAKE_CONFIG_PATH=./mooncake.json python3 -m vllm.entrypoints.openai.api_server --model m --port 8100 "
        """--kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_rank":0}'\n"""
    )
    done = installed.run("migrate", "start.sh", "mooncake.json")
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1), done.stderr
    assert "V1" in done.stdout


def test_a_light_install_serves_metadata_and_a_proxy(installed: Installed) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(installed.site), "PYTHONUNBUFFERED": "1"}
    instances = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")
    for words in (("metadata", "serve", "--port", "0"), ("proxy", "--port", "0", *instances)):
        with subprocess.Popen(
            [installed.python, "-m", "mooncake_v0", *words],
            env=environment,
            cwd=installed.site,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any(re.search(r"http://127\.0\.0\.1:\d+", line) for line in lines)
            process.kill()


def test_doctor_of_a_light_install_looks_at_the_host(installed: Installed) -> None:
    done = installed.run("doctor", "--format", "json")
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 0, done.stdout
    missing = [row["what"] for row in results if row["check"] == "pinned-versions"]
    assert missing[0] == "vllm is not installed in this environment"


def test_doctor_names_wrong_versions_of_a_throw_away_environment(
    wheel: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    python = str(make_dependencies(sys.executable))
    # the real 0.3.3, which is linked against AddressSanitizer, and records of the versions that pip takes by itself
    wrong = (str(wheel), "mooncake-transfer-engine==0.3.3")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *wrong], check=True, timeout=200
    )
    for name, version in (("vllm", "0.6.4.post1"), ("transformers", "5.24.0")):
        record = tmp_path / f"{name}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    # as after copying the package's folder beside vLLM instead of installing it
    shutil.rmtree(tmp_path / f"mooncake_v0-{__version__}.dist-info")
    names = ("pinned-versions", "version-drift", "engine-import", "plugin-entry-points")
    checks = [word for name in names for word in ("--only", name)]
    done = Installed(python, tmp_path).run("doctor", *checks, "--format", "json")
    found = {row["check"]: row for row in json.loads(done.stdout)["results"] if row["status"] != "ok"}
    assert found["pinned-versions"]["what"].startswith("mooncake-transfer-engine is 0.3.3: it is linked against Addr")
    assert "transformers 5.24.0, tested with 4.46.3" in found["version-drift"]["evidence"]
    assert "'transformers==4.46.3'" in found["version-drift"]["command"]
    assert found["engine-import"]["fix"] == "repair what pinned-versions names"
    assert "ASan" in found["engine-import"]["evidence"]
    assert found["plugin-entry-points"]["status"] == "error"
    assert found["plugin-entry-points"]["command"] == f"pip install {wheel.name}"


def test_a_python_that_vllm_does_not_know_is_refused_by_pip_and_named_by_doctor(wheel: Path, tmp_path: Path) -> None:
    python = str(make_dependencies(find_python("3.13")))
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), str(wheel)]
    refused = subprocess.run(install, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0
    assert "requires a different Python" in refused.stderr
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = Installed(python, tmp_path).run("doctor", "--only", "python-version", "--format", "json")
    (found,) = json.loads(done.stdout)["results"]
    assert (done.returncode, found["status"]) == (1, "error"), done.stderr
    assert re.fullmatch(r"Python 3\.13\.\d+ cannot run vLLM 0\.6\.4\.post1", found["what"])
    assert found["command"] == "python3.11 -m venv .venv"
