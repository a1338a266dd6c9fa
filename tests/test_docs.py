"""The documents: their commands run, their transcripts are real, and nothing that a user can set or read is missing."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Callable, Iterator

import click
import pytest
from prometheus_client import generate_latest

from mooncake_v0.cli import COMMANDS, cli
from mooncake_v0.metadata.gateway_metrics import GatewayMetrics
from mooncake_v0.proxy.balancer import Balancer, Limits
from mooncake_v0.proxy.metrics import Metrics
from tests.documents import (
    DOCUMENTS,
    ROOT,
    WRITTEN,
    Transcript,
    blocks,
    commands,
    first_json,
    inline_commands,
    matches,
    transcripts,
)
from tests.reference import PAGES
from tests.servers import answers, free_ports, start_etcd, start_redis, wait_until

README, CHINESE, OPERATING = ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "docs" / "operating.md"
BASH = [
    (block, command)
    for path in WRITTEN
    for block in blocks(path)
    if block.language == "bash"
    for command in commands(block)
]
# sections whose commands run elsewhere: tests/e2e/test_documented_pair.py, tests/deployment/test_two_documented_hosts.py,
# tests/bench/test_transfer.py, and `python -m tests.soak.new_user` for two pairs
WITH_A_PAIR = ("Start a pair", "启动一对实例", "A running pair", "Two pairs", "Measuring")
WITH_A_PAIR += ("The firewalls, from both hosts", "Keys of the dead")


@pytest.fixture
def sandbox(tmp_path: Path) -> Path:
    """A folder as a reader has it: the README's mooncake.json, configs/, and a `mooncake-v0` on the path."""
    (tmp_path / "mooncake.json").write_text(first_json(README))
    for side in ("prefill", "decode"):
        (tmp_path / side).mkdir()
        shutil.copy(tmp_path / "mooncake.json", tmp_path / side)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "pairs.toml").write_text(next(block.text for block in blocks(README) if block.language == "toml"))
    for name in ("client-keys", "token"):
        (tmp_path / name).write_text("a-long-secret-for-tests\n")
    (tmp_path / "deploy").mkdir()
    shutil.copy(tmp_path / "mooncake.json", tmp_path / "deploy")
    starts = [command for block, command in BASH if block.heading == "Start a pair" and "api_server" in command]
    for side, command in zip(("prefill", "decode"), starts):
        (tmp_path / "deploy" / f"start_{side}.sh").write_text(f"#!/bin/sh\n{command}\n")
        shutil.copy(tmp_path / "deploy" / f"start_{side}.sh", tmp_path)
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "mooncake-v0"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m mooncake_v0 "$@"\n')
    script.chmod(0o755)
    return tmp_path


def run(sandbox: Path, command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{sandbox / 'bin'}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "80"}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=sandbox,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


# --- commands ---------------------------------------------------------------------------------------------------------


OFFLINE = [
    t for path in WRITTEN for t in transcripts(path) if t.block.heading not in WITH_A_PAIR and "./Qwen" not in t.command
]


@pytest.mark.parametrize("transcript", OFFLINE, ids=lambda t: t.label)
def test_a_transcript_is_what_the_command_prints(sandbox: Path, transcript: Transcript) -> None:
    done = run(sandbox, transcript.command)
    assert matches(transcript.output, done.stdout.rstrip("\n").splitlines()), done.stdout


LOCAL = ("validate", "explain", "ports", "schema", "launch", "completion")


def is_local(command: str) -> bool:
    """Whether it needs nothing but the sandbox, and ends."""
    words = shlex.split(command)
    return words[0] == "mooncake-v0" and words[1] in LOCAL and "--online" not in words


@pytest.mark.parametrize(
    "command", sorted({command for block, command in BASH if is_local(command) and block.heading not in WITH_A_PAIR})
)
def test_a_documented_command_succeeds(sandbox: Path, command: str) -> None:
    done = run(sandbox, re.sub(r" > [/~]\S+", "", command))
    assert done.returncode == 0, done.stdout


def parse(words: list[str]) -> None:
    """Let click check a command line, down to the last option, without running it."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        with click.Context(command) as context:
            found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
    if words:
        command.make_context(command.name, list(words), help_option_names=["-h", "--help"])


EVERY = sorted(
    {command for _, command in BASH if command.startswith("mooncake-v0 ")}
    | {command for path in WRITTEN for command in inline_commands(path)}
)
# ends a placeholder or an abbreviation, in prose
ABBREVIATED = re.compile(r"…|\b(COMMAND|NAME|CHECK)\b")


@pytest.mark.parametrize("command", [command for command in EVERY if not ABBREVIATED.search(command)])
def test_every_command_in_the_documents_is_one_that_exists(
    sandbox: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sandbox)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", "mooncake.json")
    words = shlex.split(re.split(r" > ", command.replace("\\\n", " "))[0], comments=True)[1:]
    parse([word for word in words if word not in ("--version", "--help")])


# --- servers and stores -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Scheme -> URL of a real redis and a real etcd, for the addresses that the documents make up."""
    servers = [start_redis(tmp_path_factory.mktemp("redis")), start_etcd(tmp_path_factory.mktemp("etcd"))]
    yield {"redis": f"{servers[0].url}/1", "etcd": servers[1].url}
    for server in servers:
        server.stop()


def with_stores(command: str, stores: dict[str, str]) -> str:
    return re.sub(r"\b(redis|etcd)://[\w.:,/]+", lambda match: stores[match[1]], command)


SERVERS = sorted(
    {
        c
        for b, c in BASH
        if c.startswith(("mooncake-v0 metadata serve", "mooncake-v0 proxy")) and b.heading not in WITH_A_PAIR
    }
)


@pytest.mark.parametrize("command", SERVERS)
def test_a_documented_server_serves(sandbox: Path, stores: dict[str, str], command: str) -> None:
    port = free_ports(1)[0]
    words = shlex.split(with_stores(command, stores), comments=True)[1:] + ["--host", "127.0.0.1", "--port", str(port)]
    words = ["0" if before == "--admin-port" else word for before, word in zip(["", *words], words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake_v0", *words],
        cwd=sandbox,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until(lambda: process.poll() is not None or answers(port), f"an answer of {command}")
        assert process.poll() is None, process.stdout and process.stdout.read()
    finally:
        process.kill()
        process.communicate(timeout=20)


STORE_COMMANDS = sorted({c for _, c in BASH if re.match(r"mooncake-v0 metadata (?!serve)", c)})


@pytest.mark.parametrize("command", STORE_COMMANDS)
def test_a_documented_command_about_the_store_succeeds(sandbox: Path, stores: dict[str, str], command: str) -> None:
    config = json.loads((sandbox / "mooncake.json").read_text())
    (sandbox / "mooncake.json").write_text(json.dumps({**config, "metadata_server": stores["redis"]}))
    done = run(sandbox, command.replace("--for 10", "--for 1"))
    assert done.returncode == 0, done.stdout


MIGRATE = sorted({c for _, c in BASH if c.startswith("mooncake-v0 migrate")})


@pytest.mark.parametrize("command", MIGRATE)
def test_a_documented_migration_writes_what_it_says(sandbox: Path, command: str) -> None:
    done = run(sandbox, command)
    assert "Traceback" not in done.stdout
    assert done.returncode in ((0, 1) if "--check" in command else (0,)), done.stdout
    written = re.findall(r"(?:-o|--emit) (\S+)", command)
    assert [name for name in written if not (sandbox / name).exists()] == []


DOCTOR = sorted({c for _, c in BASH if c.startswith("mooncake-v0 doctor") and "--peer" not in c})


@pytest.mark.parametrize("command", DOCTOR)
def test_a_documented_doctor_ends_with_its_summary(sandbox: Path, stores: dict[str, str], command: str) -> None:
    config = {"prefill_url": "127.0.0.1:23003", "decode_url": "127.0.0.1:23103", "metadata_server": stores["redis"]}
    (sandbox / "mooncake.json").write_text(json.dumps(config))
    done = run(sandbox, command)
    assert re.fullmatch(r"\d+ errors?, \d+ warnings?, \d+ notes?; \d+ right, \d+ skipped", done.stdout.splitlines()[-1])


def test_other_commands_in_bash_blocks_are_known() -> None:
    known = (
        "mooncake-v0 ",
        "MOONCAKE_CONFIG_PATH=",
        "curl ",
        "pip install ",
        "scripts/",
        "systemctl ",
        "cp configs/",
        "(umask ",
    )
    assert [command for _, command in BASH if not command.startswith(known)] == []


@pytest.mark.parametrize(
    "command", sorted({command for _, command in BASH if command.startswith(("scripts/", "systemctl ", "cp "))})
)
def test_files_that_commands_name_are_there(command: str) -> None:
    words = shlex.split(command)
    units = {path.name for path in (ROOT / "configs" / "systemd").glob("*.service")}
    named = {re.sub("@.*", "@.service", word) for word in words if word.endswith(".service") and "*" not in word}
    assert named <= units
    scripts = [ROOT / word for word in words if word.startswith("scripts/")]
    assert [script for script in scripts if not os.access(script, os.X_OK)] == []


def test_the_secret_of_the_security_page_can_be_made(sandbox: Path) -> None:
    command = next(command for _, command in BASH if command.startswith("(umask "))
    assert run(sandbox, command).returncode == 0
    secret = sandbox / "mooncake.secret"
    assert len(secret.read_text().strip()) == 64
    assert secret.stat().st_mode & 0o077 == 0


# --- completeness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    # `python -m tests.reference` writes it again
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == PAGES[name]()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme_or_the_operating_guide(command: str) -> None:
    assert f"mooncake-v0 {command}" in README.read_text() + OPERATING.read_text()


def sources() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in (ROOT / "mooncake_v0").rglob("*.py")}


def test_every_environment_variable_is_documented() -> None:
    names = {
        node.value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"MOONCAKE_[A-Z0-9_]+", node.value)
    }
    assert "MOONCAKE_CONFIG_PATH" in names
    assert [name for name in names if f"`{name}`" not in OPERATING.read_text()] == []


def metric_names(page: bytes) -> set[str]:
    names = re.findall(r"^# TYPE (mooncake\w+) ", page.decode(), re.MULTILINE)
    return {name for name in names if not name.endswith("_created")}


def worker_page() -> bytes:
    """The plugin's counters register themselves where vLLM's do: in the process's own registry."""
    code = (
        "from mooncake_v0.vllm_plugin.metrics import WorkerMetrics\nfrom prometheus_client import generate_latest\n"
        "WorkerMetrics()\nprint(generate_latest().decode())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout


def proxy_page() -> bytes:
    return Metrics(Balancer(Limits())).render()


def gateway_page() -> bytes:
    return generate_latest(GatewayMetrics()._registry)


@pytest.mark.parametrize("page", [worker_page, proxy_page, gateway_page])
def test_every_metric_is_documented(page: Callable[[], bytes]) -> None:
    names = metric_names(page())
    assert len(names) > 5
    assert [name for name in names if f"`{name}" not in OPERATING.read_text()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_both_readmes_have_the_same_commands_and_figures() -> None:
    english, chinese = ([block.text for block in blocks(path)] for path in (README, CHINESE))
    assert chinese == english


PROSE = {
    "names in code": r"`([^`\n]+(?:\n[^`\n]+)?)`",
    "links": r"\]\((?!README)([^)]+)\)",
    "figures": r"\d(?:[\d,.]*\d)+",
    "headings": r"(?m)^(#+) ",
    "rows": r"(?m)^(\|).*\|$",
}


@pytest.mark.parametrize("what", PROSE)
def test_both_readmes_name_the_same(what: str) -> None:
    def named(path: Path) -> list[str]:
        prose = re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))
        found = [" ".join(text.split()) for text in re.findall(PROSE[what], prose)]
        return found if what in ("headings", "rows") else sorted(set(found))

    assert named(CHINESE) == named(README) != []


def test_a_readme_has_at_most_400_lines() -> None:
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in (README, CHINESE)) <= 400
