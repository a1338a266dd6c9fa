"""`--emit`: the written files start the same V1 commands, and nothing of the input gets out of its quotes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.migrate.emit import emit
from mooncake_v0.migrate.report import Migration, build
from tests.migrate.deployments import DOCUMENTED, NAMES, NEWEST, migration

WITH_INSTANCES = [name for name in NAMES if migration(name).instances]
# what a running shell alone knows is a reference in the files, and a question in the report
UNKNOWN_VALUES = {"secrets-everywhere", "hostile"}


def commands(read: Migration) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    pairs = [(item.argv, {k: v for k, v in item.env if k != "VLLM_HOST_IP"}) for item in read.instances]
    return sorted(pairs, key=lambda pair: pair[0])


@pytest.mark.parametrize("name", [name for name in WITH_INSTANCES if name not in UNKNOWN_VALUES])
def test_emitted_files_read_back_start_the_commands_of_the_report(name: str, tmp_path: Path) -> None:
    original = migration(name)
    emit(original, tmp_path)
    again = build([str(tmp_path)], original.report.target, {})
    assert commands(again) == commands(original)


@pytest.mark.parametrize("form", DOCUMENTED)
def test_emitted_files_have_the_shape_of_the_originals(form: str, tmp_path: Path) -> None:
    emit(migration(f"documented-{form}"), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    shapes = {
        "compose": {"docker-compose.v1.yaml", "Dockerfile.v1"},
        "docker": {"prefill.docker.sh", "decode.docker.sh", "proxy.sh", "Dockerfile.v1"},
        "kubernetes": {"prefill.yaml", "decode.yaml", "proxy.yaml", "Dockerfile.v1"},
        "helm": {"prefill.yaml", "decode.yaml", "proxy.yaml", "Dockerfile.v1"},
        "systemd": {"vllm-prefill.service", "vllm-decode.service", "proxy.sh"},
        "supervisord": {"supervisord.v1.conf", "proxy.sh"},
        "slurm": {"prefill.sbatch", "decode.sbatch", "proxy.sh"},
    }
    assert names == shapes.get(form, {"prefill.sh", "decode.sh", "proxy.sh"})


@pytest.mark.parametrize("name", WITH_INSTANCES)
def test_emitted_scripts_are_valid_bash_and_manifests_valid_yaml(name: str, tmp_path: Path) -> None:
    emit(migration(name), tmp_path)
    scripts = [*tmp_path.glob("*.sh"), *tmp_path.glob("*.sbatch")]
    for path in scripts:
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True, timeout=20).stderr == b""
    for path in tmp_path.glob("*.yaml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("name", ["hostile", "rope-and-chunked-prefill", "multimodal", "documented-shell"])
def test_bash_hands_vllm_exactly_the_words_of_the_report_and_runs_nothing_else(name: str, tmp_path: Path) -> None:
    original = migration(name)
    emit(original, tmp_path)
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\0" vllm "$@"\n')
    fake.chmod(0o755)
    for item in original.instances:
        ran = subprocess.run(
            ["bash", str(tmp_path / f"{item.name}.sh")],
            capture_output=True,
            timeout=20,
            cwd=tmp_path,
            env={"PATH": f"{fake.parent}:/usr/bin:/bin"},
        )
        assert ran.stdout.decode().split("\0")[:-1] == list(item.argv), ran.stderr
    assert not (tmp_path / "EXECUTED").exists()


def test_reasons_are_comments_in_the_files(tmp_path: Path) -> None:
    emit(migration("removed-flags"), tmp_path)
    text = (tmp_path / "prefill.sh").read_text()
    assert "# --swap-space 16 -> gone: V1 never swaps" in text
    assert "# kv_rank: 0 -> gone" in text


def test_a_secret_becomes_a_reference_that_the_operator_must_set(tmp_path: Path) -> None:
    emit(migration("secrets-everywhere"), tmp_path)
    text = (tmp_path / "prefill.sh").read_text()
    assert 'export HF_TOKEN="${HF_TOKEN:?set HF_TOKEN before starting this}"' in text
    pod = yaml.safe_load((tmp_path / "decode.yaml").read_text())
    env = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
    assert env["VLLM_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "tokens", "key": "api"}}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "vllm-secrets", "key": "HF_TOKEN"}}


def test_a_file_that_differs_is_not_replaced_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "prefill.sh").write_text("mine\n")
    with pytest.raises(CouldNotCheckError, match="exists and differs"):
        emit(migration("documented-shell"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["prefill.sh"]
    emit(migration("documented-shell"), tmp_path, force=True)
    assert (tmp_path / "prefill.sh").read_text() != "mine\n"


def test_emitting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first = emit(migration("documented-compose"), tmp_path)
    texts = [Path(path).read_bytes() for path in first]
    assert emit(migration("documented-compose"), tmp_path) == first
    assert [Path(path).read_bytes() for path in first] == texts


def test_a_v1_label_selector_does_not_select_v0_pods(tmp_path: Path) -> None:
    emit(migration("documented-kubernetes", NEWEST), tmp_path)
    manifest = yaml.safe_load((tmp_path / "prefill.yaml").read_text())
    assert manifest["spec"]["selector"]["matchLabels"] == {"app": "vllm-prefill-v1"}
    assert manifest["spec"]["template"]["metadata"]["labels"] == {"app": "vllm-prefill-v1"}
