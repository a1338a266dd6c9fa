"""`schema` and `explain`: the schema is a schema and agrees with the rules; every rule is explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from mooncake_v0.cli.explain import SOURCES, explain, explanations
from mooncake_v0.cli.schema import schema as schema_command
from mooncake_v0.config.check import check_bytes
from mooncake_v0.config.schema import schema
from mooncake_v0.errors import INFO

INVALID = sorted((Path(__file__).parents[2] / "examples" / "invalid").glob("*.json"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(explain, list(arguments), standalone_mode=False)


def test_printed_schema_is_a_valid_draft_2020_12_schema() -> None:
    printed = json.loads(CliRunner().invoke(schema_command, []).output)

    Draft202012Validator.check_schema(printed)
    assert printed == schema()


@pytest.mark.parametrize("name", schema()["properties"])
def test_editor_finds_title_description_and_examples_of_every_field(name: str) -> None:
    field = schema()["properties"][name]

    assert field["title"] and field["description"] and field["examples"]
    assert "default" in field or name in (*schema()["required"], "$schema")


def test_examples_in_the_schema_are_valid_by_the_rules() -> None:
    for example in schema()["examples"]:
        assert [item for item in check_bytes(json.dumps(example).encode()).diagnostics if item.severity != INFO] == []


def fails_the_schema(path: Path) -> bool:
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        return False
    return any(Draft202012Validator(schema()).iter_errors(value))


@pytest.mark.parametrize("path", [path for path in INVALID if fails_the_schema(path)], ids=lambda path: path.stem)
def test_whatever_the_schema_refuses_the_rules_report_too(path: Path) -> None:
    assert [item for item in check_bytes(path.read_bytes()).diagnostics if item.severity != INFO]


@pytest.mark.parametrize("name", explanations())
def test_every_rule_is_explained(name: str) -> None:
    item = explanations()[name]

    assert 20 <= len(item.summary) < 240
    assert item.severity in ("error", "warning", "info")
    assert "TODO" not in item.text


def test_all_rules_are_listed_within_80_columns() -> None:
    lines = run().output.splitlines()

    assert all(len(line) <= 80 for line in lines)
    assert {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "} >= set(explanations())


def test_one_rule_is_printed_with_its_severity_within_80_columns() -> None:
    output = run("ports-overlap").output

    assert output.startswith("ports-overlap (error)\n\nOn one host")
    assert all(len(line) <= 80 for line in output.splitlines())


def test_unknown_rule_names_the_nearest() -> None:
    result = CliRunner().invoke(explain, ["port-overlap"])

    assert result.exit_code == 2
    assert "the nearest is ports-overlap" in result.output


def test_json_holds_all_rules() -> None:
    assert {item["name"] for item in json.loads(run("--format", "json").output)} == set(explanations())


def test_every_source_of_explanations_can_be_imported() -> None:
    assert SOURCES and len(explanations()) > 120
