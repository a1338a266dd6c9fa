"""Everything emitted, held against the real vLLM 0.33.0: its parser, its KVTransferConfig, and the tables of facts."""

from __future__ import annotations

import json
import re

import pytest

from mooncake_v0.migrate.facts import Fact, by_name, table
from tests.migrate.deployments import NEWEST, instances, migration
from tests.migrate.v1_wheel import Parser

ALL = instances(NEWEST)
IDS = [name for name, _ in ALL]
TRANSFERRING = [(name, item.kv_transfer_config()) for name, item in ALL if item.kv_transfer_config()]

# a value that 0.6.4.post1 takes, where "1" is none
SAMPLES = {
    "--prompt-adapters": "a=/a",
    "--task": "embedding",
    "--guided-decoding-backend": "outlines",
    "--chat-template-text-format": "string",
    "--rope-scaling": '{"type":"dynamic","factor":2.0}',
    "--device": "cuda",
    "--override-neuron-config": "{}",
    "--override-pooler-config": "{}",
    "--tokenizer-pool-extra-config": "{}",
    "--preemption-mode": "swap",
    "--spec-decoding-acceptance-method": "rejection_sampler",
    "--long-lora-scaling-factors": "4.0",
}
GONE = [row for row in table("flags") if row.status in ("removed", "renamed") and row.name.startswith("-")]


def known(word: str) -> str:
    """A value that only a running shell knows, as it may be then: a number fits everywhere in the fixtures."""
    return re.sub(r"\$\{\w+\}|\$\([^)]*\)|`[^`]*`", "1", word)


def test_the_wheel_is_the_real_one(v1_parser: Parser) -> None:
    assert v1_parser.version == NEWEST


@pytest.mark.parametrize("item", [item for _, item in ALL], ids=IDS)
def test_v1_command_is_accepted_by_the_real_parser(v1_parser: Parser, item: object) -> None:
    argv = [known(word) for word in item.argv[1:]]  # type: ignore[attr-defined]
    answer = v1_parser.parse(argv)
    assert answer["ok"], answer["error"]


@pytest.mark.parametrize("text", [text for _, text in TRANSFERRING], ids=[name for name, _ in TRANSFERRING])
def test_kv_transfer_config_is_accepted_by_the_real_class(v1_parser: Parser, text: str) -> None:
    answer = v1_parser.kv_transfer_config(text)
    assert answer["ok"], answer["error"]
    assert answer["values"]["kv_role"] == json.loads(text)["kv_role"]


@pytest.mark.parametrize("row", GONE, ids=[row.name for row in GONE])
def test_removed_or_renamed_flag_is_refused_or_changed_by_the_real_parser(v1_parser: Parser, row: Fact) -> None:
    values = [] if row.takes == "0" else [SAMPLES.get(row.name, "1")]
    assert not v1_parser.parse(["serve", "m", row.name, *values])["ok"]


SAME_VALUES = {
    "--uvicorn-log-level": "info",
    "--chat-template": "{{ messages }}",
    "--lora-modules": "a=/a",
    "--dtype": "half",
    "--scheduling-policy": "priority",
}
SAME = [row for row in table("flags") if row.status in ("same", "default_changed")]


@pytest.mark.parametrize("row", SAME, ids=[row.name for row in SAME])
def test_flag_that_stays_is_accepted_by_the_real_parser(v1_parser: Parser, row: Fact) -> None:
    values = [] if row.takes == "0" else [SAME_VALUES.get(row.name, "1")]
    also = ["--tool-call-parser", "hermes"] if row.name == "--enable-auto-tool-choice" else []
    answer = v1_parser.parse(["serve", "m", row.name, *values, *also])
    assert answer["ok"], answer["error"]


REJECTED = [row for row in table("kv_config") if row.status == "removed"]


@pytest.mark.parametrize("row", REJECTED, ids=[row.name for row in REJECTED])
def test_removed_key_of_the_kv_config_is_rejected_by_the_real_class(v1_parser: Parser, row: Fact) -> None:
    text = json.dumps({"kv_connector": "MooncakeConnector", "kv_role": "kv_producer", row.name: 1})
    assert not v1_parser.kv_transfer_config(text)["ok"]


def test_v0_kv_config_itself_is_rejected(v1_parser: Parser) -> None:
    kv = migration("documented-shell").instances[0].original.arguments.value("--kv-transfer-config")
    assert not v1_parser.kv_transfer_config(kv)["ok"]


def test_load_failure_policy_defaults_to_fail(v1_parser: Parser) -> None:
    values = v1_parser.parse(
        ["serve", "m", "--kv-transfer-config", '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}']
    )["values"]
    assert "kv_load_failure_policy='fail'" in values["kv_transfer_config"]


def test_value_form_of_chunked_prefill_fails_or_is_taken_for_the_model(v1_parser: Parser) -> None:
    assert not v1_parser.parse(["serve", "m", "--enable-chunked-prefill=False"])["ok"]
    silent = v1_parser.parse(["serve", "--enable-chunked-prefill", "False"])
    assert silent["values"]["enable_chunked_prefill"] is True
    assert silent["values"]["model_tag"] == "False"


@pytest.mark.parametrize("name", ["--port", "--max-model-len", "--kv-transfer-config", "--speculative-config"])
def test_options_table_holds_what_the_parser_has(v1_parser: Parser, name: str) -> None:
    assert by_name("options")[name].takes == "1"
    assert "expected one argument" in v1_parser.parse(["serve", "m", name])["error"]
