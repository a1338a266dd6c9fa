"""The registry of doctor's checks and what they yield. A check's name is its function's with dashes, its docstring is what
`mooncake-v0 explain` prints, and the order of definition is the order of checking.
"""

from __future__ import annotations

import inspect
import subprocess
from dataclasses import asdict, dataclass
from typing import Any, Callable, Iterator, Sequence

from mooncake_v0.doctor.host import Host
from mooncake_v0.errors import ERROR, INFO, WARNING, Diagnostic, MooncakeV0Error

OK, SKIPPED = "ok", "skipped"
ORDER = (ERROR, WARNING, INFO, OK, SKIPPED)


@dataclass(frozen=True)
class Outcome:
    """What one check found.

    status:   "ok", "info", "warning", "error" or "skipped" (what could not be looked at, and why)
    what:     a fact with its value
    evidence: raw text that shows it: a line of output, a file's content
    fix:      an action in words; command: the command that does it, ready to paste
    """

    status: str
    what: str
    evidence: str = ""
    fix: str = ""
    command: str = ""


@dataclass(frozen=True)
class Result:
    """An outcome with the name of its check."""

    check: str
    outcome: Outcome

    def as_dict(self) -> dict[str, Any]:
        return {"check": self.check, **asdict(self.outcome)}


Function = Callable[[Host], Iterator[Outcome]]


@dataclass(frozen=True)
class Check:
    """One registered check; `group` is its module's short name."""

    name: str
    severity: str
    explanation: str
    group: str
    function: Function


CHECKS: dict[str, Check] = {}


def check(severity: str) -> Callable[[Function], Function]:
    """Register a function as a check; severity is the worst it reports."""

    def register(function: Function) -> Function:
        name = function.__name__.replace("_", "-")
        assert name not in CHECKS, f"two checks are named {name}"
        group = function.__module__.rpartition(".")[2]
        CHECKS[name] = Check(name, severity, inspect.cleandoc(function.__doc__ or ""), group, function)
        return function

    return register


def run_checks(host: Host, names: Sequence[str] | None = None) -> Iterator[Result]:
    """All checks, or the named ones. A check that cannot look at something yields a "skipped" with the reason."""
    for name, known in CHECKS.items():
        if names is not None and name not in names:
            continue
        try:
            for outcome in known.function(host):
                yield Result(name, outcome)
        except MooncakeV0Error as error:
            yield Result(name, Outcome(SKIPPED, f"could not be checked: {error.what}", fix=error.fix))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            # a broken host must not keep the other checks from running
            yield Result(name, Outcome(SKIPPED, f"could not be checked: {error}"))


def from_diagnostic(item: Diagnostic) -> Result:
    """A finding of validate or of `metadata check` as a result, under its own rule's name."""
    return Result(
        item.rule, Outcome(item.severity, f"{item.where}: {item.what}" if item.where else item.what, fix=item.fix)
    )


def exit_code(results: Sequence[Result]) -> int:
    """0 without errors, 1 with one."""
    return 1 if any(result.outcome.status == ERROR for result in results) else 0


def worst_first(results: Sequence[Result]) -> list[Result]:
    """Errors, then warnings, notes and what is right; the order of checking within each."""
    return sorted(results, key=lambda result: ORDER.index(result.outcome.status))


__all__ = ["ERROR", "INFO", "OK", "SKIPPED", "WARNING", "Check", "CHECKS", "Outcome", "Result", "check", "run_checks"]
