"""Rules about --kv-transfer-config: every rule by an example, and the sizes people write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_v0.cli.validate import validate
from mooncake_v0.config.kv_transfer import FIELD_TYPES, KV_RULES, check_kv_transfer_config, parse_size_bytes
from mooncake_v0.errors import ERROR, UnsupportedError
from mooncake_v0.vllm_plugin.kv_transfer_config import parse_kv_transfer_config

PRODUCER = {
    "kv_connector": "MooncakeConnector",
    "kv_role": "kv_producer",
    "kv_rank": 0,
    "kv_parallel_size": 2,
    "kv_buffer_size": 2e9,
}
CONSUMER = {**PRODUCER, "kv_role": "kv_consumer", "kv_rank": 1}


def without(name: str) -> str:
    return json.dumps({key: value for key, value in PRODUCER.items() if key != name})


def changed(**fields: Any) -> str:
    return json.dumps({**PRODUCER, **fields})


EXAMPLES: list[tuple[str, str, dict[str, Any]]] = [
    ("kv-json", '{"kv_connector": ', {}),
    ("kv-json", "{kv_connector:MooncakeConnector}", {}),
    ("kv-json", "MooncakeConnector", {}),
    ("kv-json", "[1]", {}),
    ("kv-unknown-field", changed(kv_rol="x"), {}),
    ("kv-unknown-field", changed(num_workers=10), {}),
    ("kv-wrong-type", changed(kv_rank=[0]), {}),
    ("kv-wrong-type", changed(kv_role=True), {}),
    ("kv-connector", changed(kv_connector="MooncakeStoreConnector"), {}),
    ("kv-connector", changed(kv_connector="PyNcclConnector"), {}),
    ("kv-connector", without("kv_connector"), {}),
    ("kv-role", changed(kv_role="kv_both"), {}),
    ("kv-role", changed(kv_role="prefill"), {}),
    ("kv-role-side", changed(), {"role": "decode"}),
    ("kv-rank", changed(kv_rank=1), {}),
    ("kv-wrong-type", changed(kv_rank="0"), {}),
    ("kv-rank", without("kv_rank"), {}),
    ("kv-parallel-size", changed(kv_parallel_size=3), {}),
    ("kv-parallel-size", without("kv_parallel_size"), {}),
    ("kv-buffer-size", changed(kv_buffer_size=0), {}),
    ("kv-buffer-size", changed(kv_buffer_size=-1), {}),
    ("kv-buffer-size", changed(kv_buffer_size="2 gigabytes"), {}),
    ("kv-buffer-size", changed(kv_buffer_size=True), {}),
    ("kv-buffer-size", changed(kv_buffer_size=None), {}),
    ("kv-buffer-small", changed(), {"prompt_bytes": 3 * 10**9, "max_prompt_tokens": 10000}),
    ("kv-buffer-small", without("kv_buffer_size"), {"prompt_bytes": 2 * 10**9, "max_prompt_tokens": 10000}),
    ("kv-buffer-device", changed(kv_buffer_device="gpu"), {}),
    ("kv-port-clash", changed(kv_port=8100), {"api_port": 8100}),
    ("kv-unused-field", changed(kv_ip="127.0.0.1"), {}),
]


@pytest.mark.parametrize(("rule", "text", "known"), EXAMPLES)
def test_example_yields_exactly_its_rule(rule: str, text: str, known: dict[str, Any]) -> None:
    _, found = check_kv_transfer_config(text, **known)

    assert {item.name for item, _ in found} == {rule}


def test_every_rule_has_an_example() -> None:
    assert {rule.name for rule, _ in KV_RULES.items} == {rule for rule, _, _ in EXAMPLES}


@pytest.mark.parametrize(
    "config",
    [
        PRODUCER,
        CONSUMER,
        {**PRODUCER, "kv_buffer_size": "2e9"},
        {**PRODUCER, "kv_buffer_size": "2GB"},
        {**PRODUCER, "kv_buffer_device": "cpu", "kv_buffer_size": "1.5 GiB"},
    ],
)
def test_documented_forms_have_no_findings(config: dict[str, Any]) -> None:
    assert check_kv_transfer_config(json.dumps(config))[1] == []


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        (2e9, 2 * 10**9),
        ("2e9", 2 * 10**9),
        (2000000000, 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("2G", 2 * 10**9),
        ("2GiB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("100", 100),
        (True, None),
        (None, None),
        ("", None),
        ("GB", None),
        ("-2GB", None),
        ("2XB", None),
        ("1e999", None),
        (float("inf"), None),
        (float("nan"), None),
        ([2], None),
    ],
)
def test_size_is_read_as_people_write_it(written: Any, size_bytes: int | None) -> None:
    assert parse_size_bytes(written) == size_bytes


@settings(deadline=None)
@given(
    st.text()
    | st.dictionaries(st.sampled_from(list(PRODUCER)), st.none() | st.integers() | st.text() | st.floats()).map(
        json.dumps
    )
)
def test_any_text_is_checked_without_an_exception(text: str) -> None:
    check_kv_transfer_config(text, role="prefill", api_port=8000, prompt_bytes=10, max_prompt_tokens=1)


# a fix that says `write "kv_rank": 0`, taken by its word
BY_THE_WORD = re.compile(r'write "(kv_\w+)": ("?\w+"?)')


@pytest.mark.parametrize(("rule", "text", "known"), EXAMPLES)
def test_written_fix_makes_the_finding_go_away(rule: str, text: str, known: dict[str, Any]) -> None:
    for _, finding in check_kv_transfer_config(text, **known)[1]:
        match = BY_THE_WORD.search(finding.fix)
        if match:
            fixed = json.dumps({**json.loads(text), match[1]: json.loads(match[2])})
            assert rule not in {item.name for item, _ in check_kv_transfer_config(fixed, **known)[1]}


ODD_VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [
        None,
        True,
        0,
        1,
        2,
        3,
        -1,
        0.0,
        0.5,
        1.0,
        2e9,
        "0",
        "2",
        "",
        "cpu",
        "cuda",
        "kv_both",
        "kv_producer",
        "kv_consumer",
    ]
    + ["2GB", "2 gb", "2G", "2GiB", "2B", "2e9", "1e999", "2..5", "+", "MooncakeConnector", "PyNcclConnector", [], {}]
)


@settings(deadline=None, max_examples=500)
@given(
    st.sampled_from([PRODUCER, CONSUMER]),
    st.dictionaries(st.sampled_from([*FIELD_TYPES, "num_workers", "kv_rol"]), ODD_VALUES, max_size=3),
    st.sets(st.sampled_from(list(PRODUCER)), max_size=1),
)
def test_error_is_found_exactly_when_the_plugin_refuses_to_start(
    base: dict[str, Any], changes: dict[str, Any], dropped: set[str]
) -> None:
    config = {name: value for name, value in {**base, **changes}.items() if name not in dropped}

    try:
        parse_kv_transfer_config(json.dumps(config))
    except UnsupportedError:
        is_refused = True
    else:
        is_refused = False

    found = check_kv_transfer_config(json.dumps(config))[1]
    assert any((finding.severity or rule.severity) == ERROR for rule, finding in found) == is_refused, config


def test_option_is_reported_under_its_own_name() -> None:
    result = CliRunner().invoke(validate, ["--kv-transfer-config", changed(kv_rank=1)], standalone_mode=False)

    assert result.return_value == 1
    assert result.output.startswith(
        "--kv-transfer-config: error: --kv-transfer-config.kv_rank: kv_rank is 1, kv_producer has rank 0 [kv-rank]\n"
        '  fix: write "kv_rank": 0\n'
    )


def test_both_sides_of_a_known_report_are_refused() -> None:
    """Both instances were kv_producer with rank 0, and kv_port was the API's port."""
    text = changed(kv_port=8100, kv_parallel_size=2)

    assert check_kv_transfer_config(text, role="prefill", api_port=8100)[1][0][0].name == "kv-port-clash"
    assert {rule.name for rule, _ in check_kv_transfer_config(text, role="decode", api_port=8100)[1]} == {
        "kv-role-side",
        "kv-port-clash",
    }
