"""`mooncake-v0 migrate` as its user meets it: arguments, exit codes, errors."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.migrate.deployments import FIXTURES


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_v0", "migrate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=60, cwd=FIXTURES)


def test_text_report_goes_to_standard_output_and_the_exit_code_is_0() -> None:
    done = run("documented-shell")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("MOVING TO vLLM 0.33.0 (V1): READY WITH CHANGES\n")


@pytest.mark.parametrize(("name", "code"), [("architecture-gone", 1), ("documented-shell", 0), ("already-v1", 0)])
def test_check_exits_1_on_blockers_only(name: str, code: int) -> None:
    assert run(name, "--check").returncode == code


def test_blockers_without_check_exit_0() -> None:
    assert run("architecture-gone").returncode == 0


def test_report_to_a_file_and_launch_files_to_a_folder(tmp_path: Path) -> None:
    done = run("documented-docker", "--format", "html", "-o", str(tmp_path / "r.html"), "--emit", str(tmp_path / "v1"))
    assert done.returncode == 0
    assert done.stdout == ""
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")
    assert (tmp_path / "v1" / "prefill.docker.sh").stat().st_mode & 0o111


def test_standard_input_is_read_for_a_dash() -> None:
    report = json.loads(run("-", "--format", "json", stdin="vllm serve m --port 9").stdout)
    assert report["instances"][0]["v1_command"] == "vllm serve m --port 9"


def test_hardware_answers_questions_and_blocks() -> None:
    report = json.loads(
        run("documented-shell", "--format", "json", "--hardware", "gpu=V100,driver=550,python=3.10").stdout
    )
    rules = [finding["rule"] for finding in report["findings"] if finding["severity"] == "blocker"]
    assert rules == ["gpu-too-old", "driver-too-old", "python-too-old"]
    assert not any(question.startswith("which GPUs") for question in report["questions"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the files or folders"),
        (["missing.sh"], "no such file or folder: missing.sh"),
        (["documented-shell", "--target", "0.34.0"], "use one of 0.13.0"),
        (["documented-shell", "--target", "0.10.0"], "not a version that the tables cover"),
        (["documented-shell", "--hardware", "gpu"], "is not KEY=VALUE"),
        (["documented-shell", "--hardware", "gpu=Abacus"], "give its compute capability instead"),
        (["documented-shell", "-o", "/no/such/folder/r.md"], "cannot write /no/such/folder/r.md"),
    ],
)
def test_wrong_use_gets_one_clear_error_and_exit_code_2(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_facts_are_listed_with_source_and_range() -> None:
    rows = json.loads(run("--facts", "--format", "json").stdout)
    assert len(rows) > 800
    assert [row for row in rows if not row.get("source")] == []
    lines = run("--facts").stdout.splitlines()
    assert any(line.startswith("flags  --swap-space  0.18.0") for line in lines)


def test_help_reads_well_at_80_columns_and_shows_examples() -> None:
    text = run("--help").stdout
    assert "Examples:" in text
    assert max(map(len, text.splitlines())) <= 80


def test_migrate_needs_neither_torch_nor_vllm_nor_quart() -> None:
    probe = (
        "import sys; sys.argv = ['x', 'migrate', 'documented-shell', '--format', 'html', '--emit', sys.argv[1]]\n"
        "for name in ('torch', 'vllm', 'quart', 'zmq', 'mooncake'): sys.modules[name] = None\n"
        "from mooncake_v0.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, "/dev/null/none"], capture_output=True, text=True, timeout=60, cwd=FIXTURES
    )
    assert "<!DOCTYPE html>" in done.stdout
    assert done.returncode == 2
    assert "cannot write to /dev/null/none" in done.stderr


README = FIXTURES.parents[2] / "README.md"
SECTION = README.read_text(encoding="utf-8").split("## Moving to V1")[1].split("\n## ")[0]
DOCUMENTED = [line for line in SECTION.splitlines() if line.startswith("mooncake-v0 migrate deploy/")]


@pytest.mark.parametrize("line", DOCUMENTED)
def test_a_command_of_the_readme_works(line: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "documented-shell", tmp_path / "deploy")
    command = [sys.executable, "-m", "mooncake_v0", *shlex.split(line)[1:]]
    root = str(FIXTURES.parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["v1:--swap-space", "v1:VLLM_USE_V1", "v1:kv_rank", "prefix-caching-on", "CVE-2026-48746"]
)
def test_explain_knows_the_rows(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_v0", "explain", name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith(f"{name} (")
    assert "Source: " in done.stdout
