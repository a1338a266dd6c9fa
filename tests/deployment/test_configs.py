"""What an operator deploys from configs/: each file checked by the tool it is for, and against the package itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest
import yaml

from mooncake_v0.cli import main
from mooncake_v0.config.check import check_bytes
from mooncake_v0.config.launch import make_launch
from mooncake_v0.config.launch_rules import LAUNCH_RULES
from mooncake_v0.config.port_table import peer_ports
from tests.documents import ROOT
from tests.test_docs import gateway_page, metric_names, parse, proxy_page, worker_page

CONFIGS = ROOT / "configs"
KUBERNETES = CONFIGS / "kubernetes"
INSTALLED = "/opt/mooncake-v0/bin/mooncake-v0"


def lint(*command: object, cwd: Path | None = None) -> None:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# --- systemd ----------------------------------------------------------------------------------------------------------

UNITS = sorted((CONFIGS / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    command = tmp_path / "mooncake-v0"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    (tmp_path / unit.name).write_text(unit.read_text().replace(INSTALLED, str(command)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def unit_environment() -> dict[str, str]:
    lines = (CONFIGS / "systemd" / "environment").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def as_systemd_expands(words: str) -> Iterator[str]:
    """${NAME} is one word, $NAME as many as it holds (systemd.service, COMMAND LINES)."""
    for word in shlex.split(words.replace("%i", "prefill")):
        if re.fullmatch(r"\$\w+", word):
            yield from shlex.split(unit_environment()[word[1:]])
        else:
            yield re.sub(r"\$\{(\w+)\}", lambda match: unit_environment()[match[1]], word)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_command_of_the_unit_is_one_that_exists(
    unit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    words = list(as_systemd_expands(line.removeprefix("ExecStart=")))
    assert words[0] == INSTALLED
    parse(words[1:])


# --- containers -------------------------------------------------------------------------------------------------------


def test_the_compose_file_follows_the_specification(linters: Path) -> None:
    lint(linters / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", CONFIGS / "compose" / "compose.yaml")


def compose_commands() -> dict[str, list[str]]:
    services = yaml.safe_load((CONFIGS / "compose" / "compose.yaml").read_text())["services"]
    return {name: service["command"] for name, service in services.items()}


@pytest.mark.parametrize("name", compose_commands())
def test_a_command_of_the_compose_file_is_one_that_exists(name: str) -> None:
    parse([re.sub(r"\$\{MODEL.*\}", "model", word) for word in compose_commands()[name]])


def printed_command(words: list[str], config: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `launch` would start for these words: its own checks of file and flags run, and nothing is started."""
    (folder / "mooncake.json").write_bytes(config)
    words = ["model" if "${MODEL" in word or "/Qwen" in word else word for word in words]
    words = [str(folder / "mooncake.json") if word.endswith("mooncake.json") else word for word in words]
    with pytest.raises(SystemExit) as stopped:
        main([*words[: words.index("--")], "--print", *words[words.index("--") :]])
    shown = capsys.readouterr()
    assert stopped.value.code == 0, shown.err
    return shown.out


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_launch_takes_the_command_of_the_compose_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (CONFIGS / "compose" / "mooncake.json").read_bytes()
    printed = printed_command(compose_commands()[name], config, tmp_path, capsys)
    assert f'"kv_role":"{ {"prefill": "kv_producer", "decode": "kv_consumer"}[name] }"' in printed
    services = yaml.safe_load((CONFIGS / "compose" / "compose.yaml").read_text())["services"]
    port = re.search(r"--port (\d+)", printed)
    assert port is not None
    assert services[name]["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port[1]}/health"


def test_launch_takes_the_command_of_the_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit = next(path for path in UNITS if "@" in path.name)
    line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    words = list(as_systemd_expands(line.removeprefix("ExecStart=")))
    config = (CONFIGS / "mooncake.tcp-http.json").read_bytes()
    assert "--max-model-len 10000" in printed_command(words[1:], config, tmp_path, capsys)


def test_the_image_installs_from_files_that_are_there() -> None:
    named = re.findall(r"configs/[\w./-]+", (CONFIGS / "compose" / "Dockerfile").read_text())
    assert [name for name in named if not (ROOT / name.rstrip(".")).exists()] == []


def test_hadolint_accepts_the_image_and_its_shell_lines(linters: Path) -> None:
    lint(linters / "hadolint", CONFIGS / "compose" / "Dockerfile")


def compose_config(linters: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The compose file as a compose tool reads it: anchors, defaults and variables resolved."""
    podman = folder / "podman"  # `config` asks for its version and nothing else
    podman.write_text("#!/bin/sh\necho podman version 5.0.0\n")
    podman.chmod(0o755)
    command = [str(linters / "podman-compose"), "-f", str(CONFIGS / "compose" / "compose.yaml"), "config"]
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(command, env={"PATH": path, **variables}, capture_output=True, text=True, timeout=120)


def test_a_compose_tool_resolves_the_file(linters: Path, tmp_path: Path) -> None:
    done = compose_config(linters, tmp_path, MODEL="my/model")
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    for name in ("prefill", "decode"):
        assert services[name]["command"][:5] == [
            "launch",
            name,
            "/etc/mooncake-v0/mooncake.json",
            "--model",
            "my/model",
        ]
        assert services[name]["depends_on"] == {"metadata": {"condition": "service_healthy"}}
        assert services[name]["network_mode"] == "host"


def test_a_compose_tool_says_that_the_model_is_missing(linters: Path, tmp_path: Path) -> None:
    done = compose_config(linters, tmp_path)
    assert done.returncode != 0
    assert "name the model" in done.stderr


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("compose", ("compose", "-f", "configs/compose/compose.yaml", "config", "--quiet")),
        ("buildx", ("buildx", "build", "--check", "-f", "configs/compose/Dockerfile", ".")),
    ],
)
def test_docker_accepts_it(plugin: str, words: tuple[str, ...]) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, plugin, "version"], capture_output=True, timeout=60).returncode:
        pytest.skip(f"this machine has no docker {plugin}")
    if plugin == "buildx" and subprocess.run([docker, "info"], capture_output=True, timeout=60).returncode:
        pytest.skip("no docker daemon runs here")
    done = subprocess.run(
        [docker, *words], cwd=ROOT, env={**os.environ, "MODEL": "m"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


# --- Kubernetes -------------------------------------------------------------------------------------------------------

MANIFESTS = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
PAIRS = ("pair-a", "pair-b")


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def test_kubernetes_accepts_the_manifests(linters: Path) -> None:
    lint(linters / "kubernetes-validate", "-k", "1.37", "--strict", *MANIFESTS)


def test_the_kustomization_names_every_manifest_and_every_image() -> None:
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == [path.name for path in MANIFESTS]
    images = set(re.findall(r"image: (\S+):", "".join(path.read_text() for path in MANIFESTS)))
    assert {image["name"] for image in kustomization["images"]} == images


@pytest.fixture(scope="module")
def rendered() -> str:
    """What `kubectl apply -k` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("this machine has no kubectl")
    command = ["kubectl", "kustomize", str(KUBERNETES)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout


def test_kubectl_renders_every_object_into_the_namespace(rendered: str, linters: Path, tmp_path: Path) -> None:
    found = list(yaml.safe_load_all(rendered))
    assert len(found) == sum(len(documents(path)) for path in MANIFESTS)
    assert {item["metadata"].get("namespace") for item in found if item["kind"] != "Namespace"} == {"mooncake-v0"}
    (tmp_path / "rendered.yaml").write_text(rendered)
    lint(linters / "kubernetes-validate", "-k", "1.37", "--strict", tmp_path / "rendered.yaml")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (dict, list)) and value:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, name))
    elif value not in ({}, []):
        yield (*path, str(value))


def test_kubectl_knows_every_field_of_the_workloads(rendered: str, tmp_path: Path) -> None:
    # it reads them into the types of the API, which drops what those do not have, and writes them with another image
    wanted = [item for item in yaml.safe_load_all(rendered) if item["kind"] in ("Deployment", "StatefulSet")]
    listed = {"apiVersion": "v1", "kind": "List", "items": wanted}
    (tmp_path / "workloads.json").write_text(json.dumps(listed))
    words = ["set", "image", "--local", "-f", str(tmp_path / "workloads.json"), "*=other:1", "-o", "yaml"]
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    read = {item["metadata"]["name"]: item for item in yaml.safe_load_all(done.stdout)}
    for item in wanted:
        kept = set(leaves(read[item["metadata"]["name"]]))
        assert [leaf for leaf in leaves(item) if "image" not in leaf and leaf not in kept] == []


def test_the_two_pairs_differ_in_their_name_alone() -> None:
    first, second = ((KUBERNETES / f"{name}.yaml").read_text() for name in PAIRS)
    assert first.replace("pair-a", "pair-b").replace("pair: a", "pair: b").replace("Pair a", "Pair b") == second


def pair_config(name: str) -> bytes:
    text: str = documents(KUBERNETES / f"{name}.yaml")[0]["data"]["mooncake.json"]
    return text.encode()


@pytest.mark.parametrize("name", PAIRS)
def test_the_mooncake_json_of_a_pair_is_valid_and_names_its_pods(name: str) -> None:
    config = check_bytes(pair_config(name)).config
    assert config is not None
    services = {
        item["metadata"]["name"] for item in documents(KUBERNETES / f"{name}.yaml") if item["kind"] == "Service"
    }
    for side in (config.prefill, config.decode):
        pod, service, namespace, *_ = side.host.split(".")
        assert service in services
        assert (pod, namespace) == (f"{service}-0", "mooncake-v0")


def containers(path: Path) -> list[Any]:
    return [
        container
        for item in documents(path)
        if item["kind"] in ("StatefulSet", "Deployment")
        for container in item["spec"]["template"]["spec"]["containers"]
        if "mooncake-v0" in container["image"]
    ]


@pytest.mark.parametrize("path", [KUBERNETES / "pair-a.yaml", KUBERNETES / "proxy.yaml"], ids=lambda path: path.name)
def test_a_command_of_a_pod_is_one_that_exists(path: Path) -> None:
    found = containers(path)
    assert found
    for container in found:
        parse(container["args"])


def test_launch_takes_the_commands_of_the_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for container in containers(KUBERNETES / "pair-a.yaml"):
        printed = printed_command(container["args"], pair_config("pair-a"), tmp_path, capsys)
        port = next(port["containerPort"] for port in container["ports"] if port["name"] == "api")
        assert f"--port {port} " in printed


def test_vllm_takes_the_flags_of_the_pods() -> None:
    for container in containers(KUBERNETES / "pair-a.yaml"):
        flags = container["args"][container["args"].index("--") + 1 :]
        launch = make_launch(flags, {"MOONCAKE_CONFIG_PATH": "x"}, "pod")
        wrong = [rule.name for rule, _ in LAUNCH_RULES.run(launch)]
        assert wrong == ["launch-no-transfer"]  # launch adds that flag


@pytest.mark.parametrize("name", PAIRS)
def test_the_network_policy_lets_decode_in_where_the_port_plan_says(name: str) -> None:
    config = check_bytes(pair_config(name)).config
    assert config is not None
    policies = {item["metadata"]["name"]: item["spec"] for item in documents(KUBERNETES / "network-policy.yaml")}
    (rule,) = policies[f"{name}-prefill"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == peer_ports(config, 1)
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"]["app.kubernetes.io/name"] == "decode"
    assert policies["deny-all"] == {"podSelector": {}, "policyTypes": ["Ingress"]}


# --- Prometheus, Grafana, logging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("check", "config", "prometheus.yaml"), ("test", "rules", "rules_test.yaml")])
def test_promtool_accepts_the_rules_and_their_own_tests(words: tuple[str, ...]) -> None:
    lint("promtool", *words, cwd=CONFIGS / "prometheus")


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / "grafana" / "dashboard.json").read_text())
    return loaded


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def rule_queries() -> list[str]:
    groups = yaml.safe_load((CONFIGS / "prometheus" / "rules.yaml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def test_the_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(dashboard_queries())
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    lint("promtool", "check", "rules", "rules.yaml", cwd=tmp_path)


def test_rules_and_dashboard_name_only_metrics_that_exist() -> None:
    known = metric_names(worker_page()) | metric_names(proxy_page()) | metric_names(gateway_page())
    named = {
        name for query in dashboard_queries() + rule_queries() for name in re.findall(r"\bmooncake_\w+(?!\w|:)", query)
    }
    assert len(named) > 10
    without_suffix = {re.sub(r"_bucket$", "", name) for name in named}
    assert without_suffix - known == set()


def test_the_panels_of_the_dashboard_fit_and_do_not_overlap() -> None:
    board = dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= set(board)
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_the_logging_config_gives_both_loggers_lines_in_console_and_file(
    tmp_path: Path,
) -> None:
    code = (
        "import json, logging, logging.config, sys\n"
        "logging.config.dictConfig(json.load(open(sys.argv[1])))\n"
        "for name in ('vllm', 'mooncake_v0.transfer'):\n    logging.getLogger(name).warning('from %s', name)\n"
    )
    command = [sys.executable, "-c", code, str(CONFIGS / "logging" / "vllm.json")]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=30)
    assert re.findall("from (.*)", done.stdout) == ["vllm", "mooncake_v0.transfer"], done.stderr
    assert re.findall("from (.*)", (tmp_path / "vllm.log").read_text()) == ["vllm", "mooncake_v0.transfer"]
