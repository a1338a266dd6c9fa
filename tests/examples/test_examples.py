"""Every example file says by its name what is found in it: nothing in valid/ and configs/, exactly the rule in invalid/.

invalid/RULE--VARIANT.json is a further example of RULE. options.json gives the command line options of an example.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mooncake_v0.config.check import MAX_FILE_BYTES, Checked, check_bytes
from mooncake_v0.config.fix import apply, fixed_bytes
from mooncake_v0.config.rules import RULES, CheckOptions, Edit
from mooncake_v0.config.schema import schema
from mooncake_v0.errors import ERROR, INFO

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
VALID = sorted([*HERE.glob("valid/*.json"), *CONFIGS.glob("**/mooncake*.json")])
INVALID = sorted(HERE.glob("invalid/*.json"))
OPTIONS = json.loads((HERE / "options.json").read_text())
# a file that is too large is made here, not kept
WITHOUT_FILE = {"file-too-large"}


def options_of(path: Path) -> CheckOptions:
    words = OPTIONS.get(path.stem, [])
    given = dict(zip(words[::2], words[1::2]))
    size = int(given["--tp"]) if "--tp" in given else None
    return CheckOptions(size, {given["--role"]: int(given["--api-port"])} if "--api-port" in given else {})


def check(path: Path) -> Checked:
    return check_bytes(path.read_bytes(), options_of(path))


def rule_of(path: Path) -> str:
    return path.stem.partition("--")[0]


def name_of(path: Path) -> str:
    return path.stem


def test_there_are_enough_examples() -> None:
    assert len(VALID) >= 25
    assert len(INVALID) >= 60
    assert sum(path.stem.startswith("documented-") for path in VALID) >= 10


@pytest.mark.parametrize("path", VALID, ids=name_of)
def test_valid_example_has_no_error_and_no_warning(path: Path) -> None:
    checked = check(path)

    assert [item for item in checked.diagnostics if item.severity != INFO] == []
    assert checked.config is not None


@pytest.mark.parametrize("path", VALID, ids=name_of)
def test_valid_example_fits_the_json_schema(path: Path) -> None:
    from jsonschema import Draft202012Validator

    assert list(Draft202012Validator(schema()).iter_errors(json.loads(path.read_bytes()))) == []


@pytest.mark.parametrize("path", INVALID, ids=name_of)
def test_invalid_example_yields_exactly_its_rule(path: Path) -> None:
    found = check(path).diagnostics

    assert {item.rule for item in found} == {rule_of(path)}
    assert all(item.what and item.fix and item.where.startswith("$") for item in found)


@pytest.mark.parametrize("path", INVALID, ids=name_of)
def test_config_is_built_exactly_when_no_finding_is_an_error(path: Path) -> None:
    checked = check(path)

    assert (checked.config is None) == any(item.severity == ERROR for item in checked.diagnostics)


@pytest.mark.parametrize("rule", [rule.name for rule in RULES.values() if rule.check and rule.name not in WITHOUT_FILE])
def test_every_rule_has_an_example(rule: str) -> None:
    assert (HERE / "invalid" / f"{rule}.json").exists()


def test_every_invalid_example_is_named_after_a_rule() -> None:
    assert {rule_of(path) for path in INVALID} <= set(RULES)


def test_every_option_belongs_to_an_example() -> None:
    assert set(OPTIONS) <= {path.stem for path in INVALID}


def test_a_file_over_one_mebibyte_is_refused_unread() -> None:
    found = check_bytes(b" " * (MAX_FILE_BYTES + 1)).diagnostics

    assert [item.rule for item in found] == ["file-too-large"]


CERTAIN = [path for path in INVALID if any(item.finding.edit for item in check(path).found)]


def test_the_certain_fixes_are_those_that_are_documented() -> None:
    assert {rule_of(path) for path in CERTAIN} == {
        "endpoint-blanks",
        "metadata-backend-case",
        "metadata-blanks",
        "metadata-scheme-case",
        "metadata-prefix-missing",
        "protocol-case",
        "device-name-spaces",
        "equal-urls",
    }


@pytest.mark.parametrize("path", CERTAIN, ids=name_of)
def test_certain_fix_changes_nothing_but_what_the_finding_is_about(path: Path) -> None:
    before = check(path)

    after = check_bytes(fixed_bytes(path.read_bytes(), options_of(path)), options_of(path))

    assert rule_of(path) not in {item.rule for item in after.diagnostics}
    assert after.config == before.config
    assert list(after.document.value) == list(before.document.value)


# a fix that says `write "..."`: taken by its word, it must make the finding go away
BY_THE_WORD = re.compile(
    r'(?:write|write only HOST:PORT:|add one:|use ports at least 50 apart, for example) ("(?:[^"\\]|\\.)*")(?!:| \(with)'
)


def literal_fixes() -> list[tuple[Path, str]]:
    fixes = []
    for path in INVALID:
        for item in check(path).found:
            match = BY_THE_WORD.search(item.finding.fix)
            literal = match and "HOST" not in match[1] and "..." not in match[1]
            if match and literal and item.finding.path in item_spans(path):
                fixes.append((path, match[1]))
    return fixes


def item_spans(path: Path) -> set[tuple[object, ...]]:
    return set(check(path).document.spans)


LITERAL = literal_fixes()


@pytest.mark.parametrize(("path", "literal"), LITERAL, ids=[path.stem for path, _ in LITERAL])
def test_written_fix_makes_the_finding_go_away(path: Path, literal: str) -> None:
    before = check(path)
    finding = next(item.finding for item in before.found if literal in item.finding.fix)

    text = apply(before.document, Edit(finding.path, json.loads(literal)))
    after = check_bytes(text.encode(), options_of(path))

    assert rule_of(path) not in {item.rule for item in after.diagnostics}
    assert after.config is not None or before.document.problems


# what a reader does who follows the other fixes: fields set to a new value, or removed (null)
REPAIRS: dict[str, dict[str, str | None]] = json.loads((HERE / "repairs.json").read_text())


@pytest.mark.parametrize("stem", REPAIRS)
def test_repair_that_follows_the_fix_makes_the_file_pass(stem: str) -> None:
    path = HERE / "invalid" / f"{stem}.json"
    fields = {**json.loads(path.read_bytes()), **REPAIRS[stem]}

    after = check_bytes(json.dumps({name: value for name, value in fields.items() if value is not None}).encode())

    assert [item for item in after.diagnostics if item.severity != INFO] == []
    assert rule_of(path) not in {item.rule for item in after.diagnostics}


# the whole text is to be written anew
TEXT_RULES = {rule.name for rule in RULES.values() if rule.module == "text"} | {"not-an-object"}
# notes ask for nothing, and an API port is not in the file
NOTHING_TO_DO = {rule.name for rule in RULES.values() if rule.severity == INFO} | {"api-port-clash"}


def test_the_fix_of_every_rule_is_tried() -> None:
    tried = {rule_of(path) for path, _ in LITERAL} | {rule_of(path) for path in CERTAIN}
    tried |= {stem.partition("--")[0] for stem in REPAIRS}

    assert {rule_of(path) for path in INVALID} - tried - TEXT_RULES - NOTHING_TO_DO == set()
