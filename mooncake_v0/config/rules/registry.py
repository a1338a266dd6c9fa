"""What a rule is, and the list of all rules.

A rule is one function from a `Subject` (the parsed file and the options of the check) to findings. Its name is the
function's with dashes, its docstring is what `mooncake-v0 explain` prints, and the order of definition is the order of
checking. Rules marked `syntax` judge one field alone; after one of them found an error in a field, the later ones skip
that field, so that one mistake gives one finding. All other rules see only parts whose syntax is right.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Generic, Iterator, Mapping, TypeVar

from mooncake_v0.config.addresses import MetadataAddress, parse_endpoint, parse_metadata
from mooncake_v0.config.model import MAX_RANKS, ROLES, Endpoint, Role, final_endpoints
from mooncake_v0.config.source import Document, Path, Problem, render_path

FIELDS: Mapping[Role, str] = {"prefill": "prefill_url", "decode": "decode_url"}


@dataclass(frozen=True)
class Edit:
    """A change that is certain: this value (by its path) becomes that text."""

    path: Path
    value: str


@dataclass(frozen=True)
class Finding:
    """What a rule found: where (path), a fact, an action, and the edit if the action is certain.

    related: other paths that the fact depends on. offset: the place in the text, if it is not the value's own.
    severity: only where it differs from the rule's.
    """

    path: Path
    what: str
    fix: str
    edit: Edit | None = None
    related: tuple[Path, ...] = ()
    offset: int | None = None
    severity: str | None = None


@dataclass(frozen=True)
class CheckOptions:
    """What the caller knows beyond the file.

    tensor_parallel_size: ranks per side; None means unknown, and then every size up to 16 must work.
    api_ports: the OpenAI API's port by side, as far as known.
    """

    tensor_parallel_size: int | None = None
    api_ports: Mapping[Role, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return MAX_RANKS if self.tensor_parallel_size is None else self.tensor_parallel_size


@dataclass(frozen=True)
class Subject:
    """One mooncake.json as the rules see it. A part that has an error is None."""

    document: Document
    options: CheckOptions
    fields: Mapping[str, Any]
    shape_errors: tuple[ShapeError, ...] = ()
    written: Mapping[Role, Endpoint | None] = field(default_factory=dict)
    final: Mapping[Role, Endpoint | None] = field(default_factory=dict)
    metadata: MetadataAddress | None = None
    protocol: str = "tcp"
    device_names: tuple[str, ...] = ()

    def text(self, name: str) -> str | None:
        """The field's text; None if it is absent or not a text."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else None

    def without(self, paths: set[Path]) -> Subject:
        """The same without the parts that were made of the fields at these paths, as all other rules see it."""
        names = {path[0] for path in paths if len(path) == 1}
        keep = {role: FIELDS[role] not in names for role in ROLES}
        both = all(keep.values()) or self.written == self.final  # the +100 depends on both
        return replace(
            self,
            written={role: self.written[role] if keep[role] else None for role in ROLES},
            final={role: self.final[role] if keep[role] and both else None for role in ROLES},
            metadata=None if {"metadata_server", "metadata_backend"} & names else self.metadata,
        )

    def hiding(self, paths: set[Path]) -> Subject:
        """The same without the fields at these paths, as a syntax rule sees it."""
        return replace(self, fields={key: item for key, item in self.fields.items() if (key,) not in paths})

    def problems(self, rule: str) -> Iterator[Finding]:
        for problem in self.document.problems:
            if problem.rule == rule:
                yield from_problem(problem)


@dataclass(frozen=True)
class ShapeError:
    """One violation of the JSON Schema: the keyword violated, the path, and the missing field's name."""

    keyword: str
    path: Path
    name: str = ""


def from_problem(problem: Problem) -> Finding:
    return Finding(problem.path, problem.what, problem.fix, offset=problem.offset)


def make_subject(document: Document, options: CheckOptions, shape_errors: tuple[ShapeError, ...]) -> Subject:
    fields: Mapping[str, Any] = document.value if isinstance(document.value, dict) else {}
    plain = Subject(document, options, fields, shape_errors)
    written = {role: parse_endpoint(plain.text(FIELDS[role]) or "") for role in ROLES}
    final = dict(written)
    prefill, decode = written["prefill"], written["decode"]
    if prefill is not None and decode is not None:
        final["prefill"], final["decode"] = final_endpoints(prefill, decode)
    server = plain.text("metadata_server")
    metadata = None if server is None else parse_metadata(server, plain.text("metadata_backend"))
    devices = tuple(part.strip() for part in (plain.text("device_name") or "").split(",") if part.strip())
    protocol = (plain.text("protocol") or "tcp").strip().lower()
    return Subject(document, options, fields, shape_errors, written, final, metadata, protocol, devices)


Check = Callable[[Subject], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A registered rule. `explanation` is the docstring, dedented."""

    name: str
    severity: str
    explanation: str
    check: Check | None
    syntax: bool = False
    last: bool = False
    module: str = ""

    @property
    def summary(self) -> str:
        return self.explanation.split("\n\n", 1)[0].replace("\n", " ")


RULES: dict[str, Rule] = {}


def rule(severity: str, *, syntax: bool = False, last: bool = False) -> Callable[[Check], Check]:
    """Register a function as a rule about one mooncake.json. After a finding of a `last` rule no other rule runs."""

    def register(check: Check) -> Check:
        name = check.__name__.replace("_", "-")
        assert name not in RULES, f"two rules are named {name}"
        RULES[name] = Rule(
            name, severity, inspect.cleandoc(check.__doc__ or ""), check, syntax, last, _short(check.__module__)
        )
        return check

    return register


def where(path: Path) -> str:
    return render_path(path)


def _short(module: str) -> str:
    return module.rpartition(".")[2]


def explain_only(name: str, severity: str, explanation: str, module: str = "") -> None:
    """Register a name that is reported elsewhere than by a rule about one file, so that `explain` knows it."""
    assert name not in RULES, f"two rules are named {name}"
    RULES[name] = Rule(name, severity, inspect.cleandoc(explanation), None, module=_short(module))


S = TypeVar("S")


class Checks(Generic[S]):
    """Rules about something else than one mooncake.json: an option, a launch command, a host. In order of definition."""

    def __init__(self) -> None:
        self.items: list[tuple[Rule, Callable[[S], Iterator[Finding]]]] = []

    def rule(self, severity: str) -> Callable[[Callable[[S], Iterator[Finding]]], Callable[[S], Iterator[Finding]]]:
        """Register a function as such a rule; `explain` knows it too."""

        def register(check: Callable[[S], Iterator[Finding]]) -> Callable[[S], Iterator[Finding]]:
            name = check.__name__.replace("_", "-")
            explain_only(name, severity, check.__doc__ or "", check.__module__)
            self.items.append((RULES[name], check))
            return check

        return register

    def run(self, subject: S) -> Iterator[tuple[Rule, Finding]]:
        for known, check in self.items:
            for finding in check(subject):
                yield known, finding
