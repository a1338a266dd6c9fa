"""`mooncake-v0 doctor` as its user calls it: exit codes, text, JSON, the support bundle."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mooncake_v0.pin.processes import find_free_range
from tests.servers import start_redis
from tests.unit.config.test_online import make_device


def write_config(folder: Path, metadata: str, base: int, **fields: str) -> None:
    config = {
        "prefill_url": f"127.0.0.1:{base}",
        "decode_url": f"127.0.0.1:{base + 100}",
        "metadata_server": metadata,
        **fields,
    }
    (folder / "mooncake.json").write_text(json.dumps(config))


def doctor(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_v0", "doctor", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_a_taken_port_and_nothing_else_is_named(tmp_path: Path) -> None:
    base = find_free_range(150)
    redis = start_redis(tmp_path)
    write_config(tmp_path, redis.url, base)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", base + 1))
        squatter.listen()
        done = doctor(tmp_path, "mooncake.json", "--kv-buffer-size", "1MB", "--format", "json")
    redis.stop()
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 1
    assert [(row["check"], f"port {base + 1} " in row["what"]) for row in results if row["status"] == "error"] == [
        ("online-port-busy", True)
    ]


def test_the_worst_comes_last_with_its_command(tmp_path: Path) -> None:
    arguments = ("--only", "engine-variables", "--only", "plugin-variables")
    done = doctor(tmp_path, *arguments, MC_MTU="9", NO_COLOR="1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-5:] == [
        "error    MC_MTU is '9' [engine-variables]",
        "           | MC_MTU=9",
        "         fix: use 512, 1024, 2048 or 4096",
        "         run: unset MC_MTU",
        "1 error, 0 warnings, 0 notes; 1 right, 0 skipped",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "engine-variable"), "the nearest is engine-variables"),
        (("nowhere.json",), "nowhere.json does not exist"),
        (("--kv-buffer-size", "much"), "'much' is not a size"),
        (("--log", "x.log"), "--log is for --bundle"),
        (("--peer",), "--peer needs the mooncake.json"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = doctor(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bundle_holds_what_support_needs_and_no_secret(tmp_path: Path) -> None:
    write_config(tmp_path, "redis://mooncake:hunter2secret@127.0.0.1:1/0", 23000)
    (tmp_path / "decode.log").write_text("Authorization: Bearer abcdef123456\nINFO started\n")
    variables = {"HF_TOKEN": "hf_abcdefgh12345678", "http_proxy": "http://joe:opensesame@192.0.2.1", "MC_MTU": "4096"}
    arguments = ("--bundle", "support.tar.gz", "--log", "decode.log", "--timeout", "0.5")
    done = doctor(tmp_path, "mooncake.json", *arguments, **variables)
    assert "wrote support.tar.gz" in done.stderr
    with tarfile.open(tmp_path / "support.tar.gz") as archive:
        texts = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    folder = "mooncake-v0-support/"
    names = ("doctor.json", "packages.txt", "system.txt", "environment.txt", "mooncake.json", "logs/0-decode.log")
    assert sorted(texts) == sorted(folder + name for name in names)
    everything = "\n".join(texts.values()) + done.stdout
    assert [s for s in ("hunter2secret", "abcdef123456", "hf_abcdefgh", "opensesame") if s in everything] == []
    assert "MC_MTU=4096" in texts[folder + "environment.txt"]
    assert "INFO started" in texts[folder + "logs/0-decode.log"]
    assert json.loads(texts[folder + "mooncake.json"])["prefill_url"] == "127.0.0.1:23000"


@pytest.mark.parametrize(
    ("state", "gids", "rule"),
    [
        ("1: DOWN", {0: ("::ffff:10.0.0.1", "RoCE v2")}, "online-rdma-inactive"),
        ("4: ACTIVE", {0: ("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2")}, "online-rdma-gid"),
        ("", {}, "online-rdma-missing"),
    ],
)
def test_rdma_trouble_is_named(tmp_path: Path, state: str, gids: dict[int, tuple[str, str]], rule: str) -> None:
    redis = start_redis(tmp_path)
    write_config(tmp_path, redis.url, find_free_range(150), protocol="rdma", device_name="mlx5_0")
    if state:
        make_device(tmp_path / "sys", "mlx5_0", state=state, gids=gids)
    done = doctor(tmp_path, "mooncake.json", "--role", "prefill", "--sysfs", str(tmp_path / "sys"), "--format", "json")
    redis.stop()
    assert done.returncode == 1
    assert rule in [row["check"] for row in json.loads(done.stdout)["results"] if row["status"] == "error"]


def test_no_colour_goes_into_a_pipe_or_where_none_is_wanted(tmp_path: Path) -> None:
    piped = doctor(tmp_path, "--only", "engine-variables", MC_MTU="9")
    assert "\x1b" not in piped.stdout + piped.stderr
    command = f"{sys.executable} -m mooncake_v0 doctor --only engine-variables"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "MC_MTU": "9", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    terminal = ["script", "-qec", f"{command} 2> err", "/dev/null"]
    coloured = subprocess.run(terminal, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert b"\x1b[31m" in coloured.stdout
    plain = subprocess.run(
        terminal, cwd=tmp_path, env={**environment, "NO_COLOR": "1"}, capture_output=True, timeout=60
    )
    assert b"\x1b" not in plain.stdout
