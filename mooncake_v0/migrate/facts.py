"""What is known about vLLM V1, as rows of the CSV files in `data/`; each row names its source and version range.

Everything that decides something about a target version asks here, so that a new release means new rows. Rows are
read once per process. `mooncake-v0 migrate --facts` lists them.

A version range is `since` (first release with the fact; "0.28.0-0.33.0" means that it changed somewhere in between,
and then counts from the lower end, which is the careful reading) and `until` (first release without it).
"""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import AbstractSet, Iterable

from mooncake_v0.errors import UnsupportedError

TABLES = (
    "flags",
    "envs",
    "options",
    "kv_config",
    "capabilities",
    "blockers",
    "behaviours",
    "advisories",
    "prerequisites",
    "versions",
    "metrics",
    "gpus",
    "model_names",
)
FLOOR = "0.13.0"
PINNED = "0.6.4.post1"


@dataclass(frozen=True)
class Fact:
    """One row. Columns that a table does not have are empty.

    name:      flag, variable, key, rule id, version, ... : what the row is about
    takes:     values that a flag takes: "0", "1", "?", "+"
    action:    what to do with it: keep, drop, rename, or the name of a converter
    when:      condition on the tags of a deployment, see `holds`
    fixed:     first version in which an advisory is fixed
    """

    table: str
    name: str
    takes: str = ""
    status: str = ""
    action: str = ""
    replacement: str = ""
    when: str = ""
    since: str = ""
    until: str = ""
    fixed: str = ""
    severity: str = ""
    title: str = ""
    text: str = ""
    fix: str = ""
    source: str = ""

    def as_dict(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if value}


_COLUMNS = {field.name for field in fields(Fact)}
# columns with a name of their own in one table
_ALIASES = {
    "id": "name",
    "pattern": "name",
    "architecture": "replacement",
    "compute_capability": "replacement",
    "date": "since",
}


@functools.cache
def table(name: str) -> tuple[Fact, ...]:
    """All rows of one table, in file order."""
    path = resources.files("mooncake_v0.migrate").joinpath("data", f"{name}.csv")
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return tuple(_row(name, row) for row in rows)


def _row(name: str, row: dict[str, str]) -> Fact:
    values = {_ALIASES.get(key, key): value for key, value in row.items()}
    return Fact(table=name, **{key: value for key, value in values.items() if key in _COLUMNS})


def all_facts() -> list[Fact]:
    return [fact for name in TABLES for fact in table(name)]


def find(name: str, table_name: str | None = None) -> list[Fact]:
    """Rows about one flag, variable or rule id, in all tables or one."""
    rows = table(table_name) if table_name else all_facts()
    return [fact for fact in rows if fact.name.lower() == name.lower()]


@functools.cache
def by_name(table_name: str) -> dict[str, Fact]:
    return {fact.name: fact for fact in table(table_name)}


def version_key(version: str) -> tuple[int, ...]:
    """Sort key of a release: "0.6.4.post1" after "0.6.4"; text that is no version sorts first."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def applies(fact: Fact, target: str) -> bool:
    """Whether the target version lies in the row's range."""
    since = fact.since.split("-")[0]
    if since and version_key(target) < version_key(since):
        return False
    return not fact.until or version_key(target) < version_key(fact.until)


def has(capability: str, target: str) -> bool:
    """Whether the target has a capability of the connector (table capabilities)."""
    return applies(by_name("capabilities")[capability], target)


def holds(when: str, tags: AbstractSet[str]) -> bool:
    """Evaluate a condition: terms separated by spaces must all hold; "!" negates; "gpu-cc-below:7.5" compares.

    Example: "feature:multimodal !flag:--limit-mm-per-prompt".
    """
    return all(_term(term, tags) for term in when.split())


def _term(term: str, tags: AbstractSet[str]) -> bool:
    if term.startswith("!"):
        return not _term(term[1:], tags)
    if term == "role:any":
        return True
    match = re.fullmatch(r"(.+)-(below|above):(.+)", term)
    if not match:
        return term in tags
    known = [tag.partition(":")[2] for tag in tags if tag.startswith(match[1] + ":")]
    if match[2] == "below":
        return any(version_key(value) < version_key(match[3]) for value in known)
    return any(version_key(value)[:2] > version_key(match[3])[:2] for value in known)


def known_targets() -> list[str]:
    """Versions that the tables cover as targets, oldest first."""
    names = (fact.name for fact in table("versions"))
    return sorted((name for name in names if version_key(name) >= version_key(FLOOR)), key=version_key)


def check_target(target: str) -> str:
    """The target version as asked for, or an error that lists what is known."""
    known = known_targets()
    if target not in known:
        raise UnsupportedError(
            f"target {target!r} is not a version that the tables cover",
            fix=f"use one of {', '.join(known)}",
        )
    return target


def newest_target() -> str:
    return known_targets()[-1]


def compute_capability(gpu: str) -> str | None:
    """Compute capability of a GPU named as in `--hardware gpu=H100`; accepts "7.5" itself too."""
    if re.fullmatch(r"\d+\.\d+", gpu):
        return gpu
    wanted = re.sub(r"[^a-z0-9]", "", gpu.lower())
    names: Iterable[Fact] = sorted(table("gpus"), key=lambda fact: -len(fact.name))
    for fact in names:
        if re.search(rf"(?<![a-z0-9]){fact.name.lower()}(?![0-9])", gpu.lower()) or wanted == fact.name.lower():
            return fact.replacement
    return None


def guess_architecture(model: str) -> Fact | None:
    """The architecture that a checkpoint's name suggests; a guess, and reported as one."""
    return next((fact for fact in table("model_names") if re.search(fact.name, model.lower())), None)
