"""Rules about launch commands: every rule by an example, read from real script text, and the pin's own list of flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mooncake_v0.cli.validate import validate
from mooncake_v0.config.launch import known_flags, make_launch, server_arguments
from mooncake_v0.config.launch_rules import LAUNCH_RULES, PROXY_RULES
from mooncake_v0.config.pair_rules import PAIR_RULES

CONFIG = {
    "prefill_url": "192.168.0.137:13003",
    "decode_url": "192.168.0.139:13003",
    "metadata_server": "http://192.168.0.139:8080/metadata",
    "protocol": "tcp",
    "device_name": "",
}
PRODUCER = (
    '\'{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_rank":0,'
    '"kv_parallel_size":2,"kv_buffer_size":2e9}\''
)
CONSUMER = PRODUCER.replace("kv_producer", "kv_consumer").replace('"kv_rank":0', '"kv_rank":1')
MODULE = "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"
ENVIRONMENT = "MOONCAKE_CONFIG_PATH=./mooncake.json VLLM_USE_MODELSCOPE=True"
LIMITS = "--max-model-len 10000 --gpu-memory-utilization 0.8"
PREFILL = f"{ENVIRONMENT} {MODULE} --port 8100 {LIMITS} --kv-transfer-config {PRODUCER}"
DECODE = f"{ENVIRONMENT} {MODULE} --port 8200 {LIMITS} --kv-transfer-config {CONSUMER}"
OTHER_GPU = "CUDA_VISIBLE_DEVICES=0 " + PREFILL + " &\nCUDA_VISIBLE_DEVICES=1 " + DECODE + "\n"


def run(folder: Path, script: str, *arguments: str, **config: Any) -> Result:
    (folder / "mooncake.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "start.sh").write_text(script)
    return CliRunner().invoke(validate, ["--launch", str(folder / "start.sh"), *arguments], standalone_mode=False)


def rules(folder: Path, script: str, **config: Any) -> set[str]:
    result = run(folder, script, "--format", "json", **config)
    return {item["rule"] for file in json.loads(result.output)["files"] for item in file["diagnostics"]}


@pytest.mark.parametrize(
    "script",
    [
        PREFILL,
        DECODE,
        "#!/bin/bash\nset -e\n" + OTHER_GPU,
        PREFILL.replace(MODULE, "vllm serve Qwen/Qwen2.5-7B-Instruct"),
        PREFILL.replace(" --", " \\\n    --"),
        PREFILL.replace("--max-model-len 10000", "--max_model_len=10000"),
        "export MOONCAKE_CONFIG_PATH=./mooncake.json\nTP=4\n"
        + PREFILL.replace(ENVIRONMENT, "")
        + ' --tensor-parallel-size "$TP"',
        PREFILL + " -tp 2",
    ],
    ids=["prefill", "decode", "both", "serve", "lines", "underscores", "exported", "short"],
)
def test_documented_commands_have_no_findings(tmp_path: Path, script: str) -> None:
    result = run(tmp_path, script)

    assert result.exception is None
    assert result.return_value == 0, result.output
    assert "start.sh: valid\n" in result.output


EXAMPLES = [
    ("launch-arguments", PREFILL + " --max-num-seqs"),
    ("launch-flag-unknown", PREFILL + " --data-parallel-size 2"),
    ("launch-flag-unknown", PREFILL + " --max-modl-len 4"),
    ("launch-no-transfer", f"{ENVIRONMENT} {MODULE} --port 8100"),
    ("launch-config-path", PREFILL.replace("MOONCAKE_CONFIG_PATH=./mooncake.json", "")),
    ("launch-tensor-parallel", PREFILL + " --tensor-parallel-size 32"),
    ("launch-tensor-parallel", PREFILL + " -tp two"),
    ("launch-pipeline-parallel", PREFILL + " --pipeline-parallel-size 2"),
    ("launch-pipeline-parallel", PREFILL + " -pp 2"),
    ("launch-speculative", PREFILL + " --speculative-model draft --num-speculative-tokens 3"),
    ("launch-multi-step", PREFILL + " --num-scheduler-steps 8"),
    ("launch-task", PREFILL + " --task embedding"),
    ("launch-chunked-prefill", DECODE + " --enable-chunked-prefill"),
    ("launch-chunked-prefill", DECODE.replace("10000", "65536")),
    ("launch-engine-v1", "VLLM_USE_V1=1 " + PREFILL),
    ("launch-engine-variable", "MC_MTU=1500 " + PREFILL),
    ("launch-engine-variable", "MC_HANDSHAKE_LISTEN_BACKLOG=many " + PREFILL),
    ("launch-engine-variable", "MC_USE_IPV6=0 " + PREFILL),
    ("launch-old-variable", "VLLM_DISTRIBUTED_KV_ROLE=producer " + PREFILL),
    (
        "pair-same-role",
        "CUDA_VISIBLE_DEVICES=0 " + PREFILL + "\nCUDA_VISIBLE_DEVICES=1 " + PREFILL.replace("8100", "8200"),
    ),
    ("pair-differs", "CUDA_VISIBLE_DEVICES=0 " + PREFILL + "\nCUDA_VISIBLE_DEVICES=1,2 " + DECODE + " -tp 2"),
    ("pair-differs", OTHER_GPU.rstrip() + " --kv-cache-dtype fp8"),
    ("pair-model-differs", OTHER_GPU.replace("--port 8200", "--port 8200 --model Qwen/Qwen2.5-14B-Instruct")),
    ("http-proxy", "http_proxy=http://10.0.0.9:3128 " + PREFILL),
    ("http-proxy", "export ALL_PROXY=http://10.0.0.9:3128 no_proxy=localhost,.internal\n" + PREFILL),
    ("kv-rank", PREFILL.replace('"kv_rank":0', '"kv_rank":1')),
    ("kv-port-clash", PREFILL.replace('"kv_rank":0', '"kv_rank":0,"kv_port":8100')),
    ("launch-config-unchecked", PREFILL.replace("./mooncake.json", "/etc/mooncake/no-such-file.json")),
    ("launch-not-found", "echo hello\n"),
]


@pytest.mark.parametrize(("rule", "script"), EXAMPLES)
def test_example_yields_exactly_its_rule(tmp_path: Path, rule: str, script: str) -> None:
    assert rules(tmp_path, script) == {rule}


ON_ONE_MACHINE = [
    ("pair-api-port", OTHER_GPU.replace("8200", "8100")),
    ("pair-gpus", OTHER_GPU.replace("CUDA_VISIBLE_DEVICES=1", "CUDA_VISIBLE_DEVICES=0,1")),
]


@pytest.mark.parametrize(("rule", "script"), ON_ONE_MACHINE)
def test_clash_on_one_machine_is_none_on_two(tmp_path: Path, rule: str, script: str) -> None:
    assert rules(tmp_path, script, decode_url="192.168.0.137:13103") == {rule}
    assert rules(tmp_path, script) == set()


def test_two_pairs_in_one_script_are_not_compared(tmp_path: Path) -> None:
    other = DECODE.replace("./mooncake.json", "/etc/no-such-file.json").replace("Qwen2.5-7B", "Qwen2.5-14B")

    assert rules(tmp_path, f"{PREFILL}\n{other} -tp 2\n") == {"launch-config-unchecked"}


def test_commands_in_one_file_are_on_one_machine_if_the_config_is_unknown(tmp_path: Path) -> None:
    script = OTHER_GPU.replace("8200", "8100").replace("./mooncake.json", "/etc/no-such-file.json")

    assert rules(tmp_path, script) == {"pair-api-port", "launch-config-unchecked"}


def test_every_rule_has_an_example() -> None:
    names = {rule.name for checks in (LAUNCH_RULES, PAIR_RULES, PROXY_RULES) for rule, _ in checks.items}

    assert names <= {rule for rule, _ in (*EXAMPLES, *ON_ONE_MACHINE)}


@pytest.mark.parametrize(
    "script",
    [
        "no_proxy=192.168.0.139 http_proxy=http://10.0.0.9:3128 " + PREFILL,
        "NO_PROXY='*' http_proxy=http://10.0.0.9:3128 " + PREFILL,
        "http_proxy= " + PREFILL,
        "HTTP_PROXY=http://10.0.0.9:3128 " + PREFILL,
    ],
)
def test_exempt_metadata_server_needs_no_warning_about_a_proxy(tmp_path: Path, script: str) -> None:
    assert rules(tmp_path, script) == set()


def test_plain_vllm_in_the_same_script_may_do_what_transfer_cannot(tmp_path: Path) -> None:
    assert (
        rules(tmp_path, f"{MODULE} --port 9000 -pp 2 --speculative-model draft --num-scheduler-steps 8\n{PREFILL}")
        == set()
    )


def test_command_gives_its_size_and_port_to_the_port_plan(tmp_path: Path) -> None:
    close = {"decode_url": "192.168.0.137:13013"}

    assert rules(tmp_path, PREFILL + " -tp 8", **close) == {"ports-overlap"}
    assert rules(tmp_path, PREFILL + " -tp 4", **close) == {"ports-too-close"}
    assert rules(tmp_path, PREFILL.replace("8100", "13004")) == {"api-port-clash"}


def test_named_config_is_checked_though_only_the_command_was_given(tmp_path: Path) -> None:
    assert rules(tmp_path, PREFILL, protocol="quic") == {"protocol-unknown"}


def test_buffer_is_compared_with_a_model_that_is_on_disk(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "hidden_size": 3584,
                "torch_dtype": "bfloat16",
            }
        )
    )
    script = PREFILL.replace("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", str(model))

    assert rules(tmp_path, script) == set()
    assert rules(tmp_path, script.replace("2e9", "5e8")) == {"kv-buffer-small"}
    assert rules(tmp_path, script.replace("2e9", "5e8") + " -tp 4") == set()


UNIT = f"""[Service]
Environment=MOONCAKE_CONFIG_PATH=/no-such-folder/mooncake.json
ExecStart=/opt/venv/bin/vllm serve m --port 8100 -pp 2 --kv-transfer-config {PRODUCER}
"""
COMPOSE = f"""services:
  decode:
    image: vllm/vllm-openai:v0.6.4.post1
    environment: {{MOONCAKE_CONFIG_PATH: /no-such-folder/mooncake.json}}
    command: [--model, m, --port, "8200", -pp, "2", --kv-transfer-config, {CONSUMER}]
"""


@pytest.mark.parametrize(
    ("name", "text", "line"), [("prefill.service", UNIT, 3), ("compose.yaml", COMPOSE, 3)], ids=["systemd", "compose"]
)
def test_commands_are_found_in_units_and_manifests(tmp_path: Path, name: str, text: str, line: int) -> None:
    (tmp_path / name).write_text(text)

    result = CliRunner().invoke(validate, ["--launch", str(tmp_path / name), "--format", "json"], standalone_mode=False)

    found = json.loads(result.output)["files"][0]["diagnostics"]
    assert {item["rule"] for item in found} == {"launch-pipeline-parallel", "launch-config-unchecked"}
    assert {item["line"] for item in found} == {line}


def test_pair_in_two_files_is_compared_and_both_are_named(tmp_path: Path) -> None:
    (tmp_path / "mooncake.json").write_text(json.dumps({**CONFIG, "decode_url": "192.168.0.137:13103"}))
    for name, command in (("prefill.sh", PREFILL), ("decode.sh", DECODE.replace("8200", "8100"))):
        (tmp_path / name).write_text(command)
    arguments = ["--launch", str(tmp_path / "prefill.sh"), "--launch", str(tmp_path / "decode.sh")]

    result = CliRunner().invoke(validate, arguments, standalone_mode=False)

    assert f"both commands ({tmp_path}/prefill.sh:1 and {tmp_path}/decode.sh:1) use API port 8100" in result.output


def test_file_that_is_missing_exits_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(validate, ["--launch", str(tmp_path / "none.sh")], standalone_mode=False)

    assert (result.exception, result.return_value) == (None, 2)


def test_finding_names_the_line_of_the_command(tmp_path: Path) -> None:
    result = run(tmp_path, "#!/bin/sh\n\n" + PREFILL + " -pp 2\n")

    assert f"{tmp_path}/start.sh:3:1: error: --pipeline-parallel-size: " in result.output


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["vllm", "serve", "m", "--port", "1"], ("m", "--port", "1")),
        (["/opt/venv/bin/vllm", "serve", "m"], ("m",)),
        (["python3", "-u", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], ("--model", "m")),
        (["python", "vllm/entrypoints/openai/api_server.py", "--model", "m"], ("--model", "m")),
        (["vllm", "complete"], None),
        (["python", "-m", "http.server"], None),
    ],
)
def test_server_command_is_recognised(words: list[str], arguments: tuple[str, ...] | None) -> None:
    assert server_arguments(words) == arguments


def test_flags_mean_what_they_mean_to_vllm() -> None:
    launch = make_launch(["model", "--tensor_parallel", "4", "-pp=2", "--enable-chunked-prefill", "--port=81"], {}, "x")

    assert launch.flags == {
        "model_tag": "model",
        "model": "model",
        "tensor_parallel_size": "4",
        "pipeline_parallel_size": "2",
        "enable_chunked_prefill": "true",
        "port": "81",
    }


@pytest.mark.pin
def test_list_of_flags_is_that_of_the_pins_own_parser() -> None:
    import argparse

    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils import FlexibleArgumentParser

    kinds = {0: "nothing", "?": "optional", "*": "many", "+": "many", None: "one"}
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = {
        (action.option_strings[0] if action.option_strings[0].startswith("--") else action.option_strings[1]): kinds[
            action.nargs
        ]
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction)
    }

    ours = {flag: takes for flag, _, takes in known_flags() if flag not in ("--kv-transfer-config", "--config")}
    assert ours == {flag: kind for flag, kind in flags.items() if flag != "--kv-transfer-config"}
