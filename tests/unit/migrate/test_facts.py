"""The tables: complete, sourced, in range; and what is asked of them."""

from __future__ import annotations

import re

import pytest

from mooncake_v0.errors import UnsupportedError
from mooncake_v0.migrate.converters import CONVERTERS
from mooncake_v0.migrate.facts import (
    Fact,
    all_facts,
    applies,
    by_name,
    check_target,
    compute_capability,
    find,
    has,
    holds,
    known_targets,
    table,
)

ACTIONS = {"keep", "drop", "rename", "replace", "entrypoint", "new", *CONVERTERS}


def test_every_row_names_its_source() -> None:
    assert [fact.name for fact in all_facts() if not fact.source] == []


def test_every_version_in_a_range_is_known() -> None:
    known = {fact.name for fact in table("versions")} | {"0.10.2", "0.10.3", "0.11.1", "0.8.1", "0.8.2"}
    parts = {part for fact in all_facts() if fact.table != "versions" for part in fact.since.split("-") + [fact.until]}
    assert parts - known - {""} == set()


@pytest.mark.parametrize("name", ["flags", "envs", "kv_config"])
def test_every_action_is_one_that_the_code_has(name: str) -> None:
    assert {fact.action for fact in table(name)} <= ACTIONS


def test_rules_have_names_of_their_own() -> None:
    names = [fact.name for name in ("blockers", "behaviours", "advisories") for fact in table(name)]
    assert len(names) == len(set(names))


def test_renamed_flags_name_their_successor() -> None:
    renamed = [row for row in table("flags") if row.action == "rename"]
    assert renamed
    assert [row.name for row in renamed if not row.replacement.startswith("--")] == []


@pytest.mark.parametrize(
    ("since", "until", "target", "expected"),
    [
        ("", "", "0.13.0", True),
        ("0.16.0", "", "0.15.1", False),
        ("0.16.0", "", "0.16.0", True),
        ("0.28.0-0.33.0", "", "0.28.0", True),
        ("0.28.0-0.33.0", "", "0.27.0", False),
        ("0.13.0", "0.19.0", "0.18.0", True),
        ("0.13.0", "0.19.0", "0.19.0", False),
    ],
)
def test_version_range(since: str, until: str, target: str, expected: bool) -> None:
    assert applies(Fact("t", "n", since=since, until=until), target) is expected


@pytest.mark.parametrize(
    ("when", "tags", "expected"),
    [
        ("role:any", set(), True),
        ("flag:--x", {"flag:--x"}, True),
        ("flag:--x !flag:--y", {"flag:--x", "flag:--y"}, False),
        ("gpu-cc-below:7.5", {"gpu-cc:7.0"}, True),
        ("gpu-cc-below:7.5", {"gpu-cc:7.5"}, False),
        ("gpu-cc-below:7.5", {"gpu-cc:10.0"}, False),
        ("gpu-cc-below:7.5", set(), False),
        ("driver-below:580", {"driver:535.104"}, True),
        ("python-above:3.13", {"python:3.13.1"}, False),
        ("python-above:3.13", {"python:3.14"}, True),
    ],
)
def test_condition(when: str, tags: set[str], expected: bool) -> None:
    assert holds(when, tags) is expected


@pytest.mark.parametrize(
    ("gpu", "capability"),
    [
        ("H100", "9.0"),
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("v100-32g", "7.0"),
        ("L40S", "8.9"),
        ("l4", "8.9"),
        ("8.6", "8.6"),
    ],
)
def test_compute_capability(gpu: str, capability: str) -> None:
    assert compute_capability(gpu) == capability


def test_an_unknown_gpu_has_none() -> None:
    assert compute_capability("abacus") is None


def test_targets_start_where_the_connector_starts() -> None:
    assert known_targets()[0] == "0.13.0"
    assert known_targets()[-1] == "0.33.0"
    with pytest.raises(UnsupportedError, match="not a version"):
        check_target("0.12.0")


@pytest.mark.parametrize(("capability", "first"), [("bootstrap_server", "0.16.0"), ("device_name", "0.25.0")])
def test_capability_starts_with_its_version(capability: str, first: str) -> None:
    before = known_targets()[known_targets().index(first) - 1]
    assert has(capability, first)
    assert not has(capability, before)


def test_find_is_by_name_in_any_case() -> None:
    assert [row.table for row in find("vllm_use_v1")] == ["envs"]
    assert by_name("flags")["--swap-space"].status == "removed"


def test_no_row_names_a_registry_host_or_a_path_of_a_machine() -> None:
    text = "\n".join(" ".join(fact.as_dict().values()) for fact in all_facts())
    assert re.findall(r"pypi\.|/(?:home|root|tmp|work)/", text) == []
