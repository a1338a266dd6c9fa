"""Reports of whole deployments: byte for byte, equal over formats, and what the documented one must say."""

from __future__ import annotations

import json

import pytest

from mooncake_v0.migrate.facts import known_targets
from mooncake_v0.migrate.render import FORMATS, render
from mooncake_v0.migrate.report import build
from tests.migrate.deployments import DOCUMENTED, NAMES, NEWEST, beside_fixtures, migration
from tests.migrate.golden import REPORTS, path_of

KV_P = (
    '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_load_failure_policy":"recompute",'
    '"kv_connector_extra_config":{"mooncake_protocol":"rdma","device_name":"erdma_0"}}'
)
KV_D = KV_P.replace("kv_producer", "kv_consumer")
SERVE = "VLLM_USE_MODELSCOPE=True vllm serve Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 --port"
FLAGS = "--max-model-len 10000 --gpu-memory-utilization 0.8 --kv-transfer-config"
PREFILL = f"VLLM_HOST_IP=192.168.0.137 VLLM_MOONCAKE_BOOTSTRAP_PORT=8998 {SERVE} 8100 {FLAGS} '{KV_P}'"
DECODE = f"VLLM_HOST_IP=192.168.0.139 {SERVE} 8200 {FLAGS} '{KV_D}'"
PROXY = (
    "python3 mooncake_connector_proxy.py --host 0.0.0.0 --port 8000 "
    "--prefill http://192.168.0.137:8100 8998 --decode http://192.168.0.139:8200"
)


def without_places(name: str) -> str:
    report = migration(name, NEWEST).report.as_dict()
    del report["read"]
    return json.dumps(report, indent=1)


def test_there_are_at_least_thirty_deployments() -> None:
    assert len(NAMES) >= 30


@pytest.mark.parametrize(("name", "form"), REPORTS)
def test_report_is_the_golden_one_byte_for_byte(name: str, form: str) -> None:
    # wrong on purpose after a change of the tables: `python -m tests.migrate.golden`, then read the diff
    assert render(migration(name).report, form).encode() == path_of(name, form).read_bytes()


@pytest.mark.parametrize("form", FORMATS)
def test_same_input_gives_the_same_bytes(form: str) -> None:
    with beside_fixtures():
        again = build(["two-pairs"], NEWEST, {}).report
    assert render(again, form) == render(migration("two-pairs").report, form)


@pytest.mark.parametrize("form", DOCUMENTED)
def test_documented_deployment_gives_the_documented_v1_commands_in_every_format(form: str) -> None:
    report = migration(f"documented-{form}").report
    assert [item.v1_command for item in report.instances] == [PREFILL, DECODE]
    assert report.proxy_commands == (PROXY,)


@pytest.mark.parametrize("form", DOCUMENTED)
def test_same_deployment_gives_the_same_report_in_every_format(form: str) -> None:
    assert without_places(f"documented-{form}") == without_places("documented-shell")


@pytest.mark.parametrize("form", DOCUMENTED)
def test_documented_deployment_is_read_without_a_guess(form: str) -> None:
    assert migration(f"documented-{form}").report.unread == ()


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("already-v1", "ready"),
        ("documented-shell", "ready with changes"),
        ("architecture-gone", "blocked"),
        ("bitsandbytes", "blocked"),
        ("gguf", "blocked"),
        ("lora", "blocked"),
        ("adapters-blocked", "blocked"),
        ("old-gpu", "blocked"),
        ("tensor-parallel-undivided", "blocked"),
        ("tensor-parallel-differs", "blocked"),
        ("pipeline-parallel", "blocked"),
        ("awq-fp8-cache", "blocked"),
        ("kubernetes-environment", "blocked"),
        ("nothing-to-migrate", "blocked"),
        ("multimodal", "ready with changes"),
        ("data-parallel", "ready with changes"),
    ],
)
def test_verdict(name: str, verdict: str) -> None:
    assert migration(name).report.verdict == verdict


@pytest.mark.parametrize(
    ("name", "target", "verdict"),
    [
        ("tensor-parallel-differs", "0.19.0", "ready with changes"),
        ("pipeline-parallel", "0.24.0", "ready with changes"),
        ("documented-tcp", "0.14.0", "ready with changes"),
        ("documented-tcp", "0.13.0", "blocked"),
        ("bitsandbytes", "0.27.0", "ready with changes"),
        ("architecture-gone", "0.23.0", "ready with changes"),
    ],
)
def test_a_blocker_ends_where_its_version_range_ends(name: str, target: str, verdict: str) -> None:
    assert migration(name, target).report.verdict == verdict


@pytest.mark.parametrize("target", known_targets())
def test_every_known_target_gives_a_report(target: str) -> None:
    assert migration("documented-shell", target).report.instances[0].v1_command.startswith("VLLM_HOST_IP=")


def test_an_old_target_uses_the_port_formula_and_a_newer_one_a_single_bootstrap_port() -> None:
    rows = {target: migration("toy-proxy-old-target", target).report.ports for target in ("0.15.1", "0.16.0")}
    assert [row.ports for row in rows["0.15.1"] if row.use.startswith("ZeroMQ")] == ["8998-8999"]
    assert [row.ports for row in rows["0.16.0"] if row.use.startswith("bootstrap")] == ["8998"]


def test_two_prefill_instances_on_one_host_get_bootstrap_ports_of_their_own() -> None:
    ports = [row.ports for row in migration("two-pairs").report.ports if row.use.startswith("bootstrap")]
    assert ports == ["8998", "8999"]


def test_two_models_get_a_proxy_each() -> None:
    assert len(migration("two-pairs").report.proxy_commands) == 2


def test_ipv6_addresses_are_bracketed_in_urls_and_plain_in_firewall_lines() -> None:
    report = migration("ipv6").report
    assert "--prefill 'http://[fd00:aa::137]:8100' 8998" in report.proxy_commands[0]
    assert "nft add rule inet filter input ip6 saddr fd00:aa::139 tcp dport 8998 accept" in report.firewall


def test_a_flag_that_no_release_knows_is_kept_apart_and_asked_about() -> None:
    report = migration("mangled-quoting").report
    with beside_fixtures():
        strange = build(["-"], NEWEST, {}, "vllm serve m --fancy-new-flag 3 --port 1").report
    assert report.instances
    assert strange.instances[0].not_carried == ("--fancy-new-flag 3",)
    assert "--fancy-new-flag" not in strange.instances[0].v1_command
    assert any("--fancy-new-flag 3" in question for question in strange.questions)
