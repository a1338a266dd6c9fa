"""Findings as text, JSON, SARIF 2.1.0 or GitHub annotations. Data in, text out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from mooncake_v0 import __version__
from mooncake_v0.config.rules.registry import RULES
from mooncake_v0.errors import ERROR, INFO, WARNING, Diagnostic

Style = Callable[[str, str], str]
SARIF_LEVELS = {ERROR: "error", WARNING: "warning", INFO: "note"}
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


@dataclass(frozen=True)
class FileReport:
    """What was found in one input (a file, an option, a host). valid: nothing in it keeps the pair from working."""

    path: str
    valid: bool
    diagnostics: tuple[Diagnostic, ...]


def plain(text: str, kind: str) -> str:
    """A `Style` without colour."""
    return text


def as_text(reports: Sequence[FileReport], style: Style = plain) -> str:
    """Two lines for each finding, and one for each file. style colours a word by "error", "warning", "info", "good"."""
    lines = []
    for report in reports:
        for item in report.diagnostics:
            place = f"{report.path}:{item.line}:{item.column}" if item.line else report.path
            lines.append(f"{place}: {style(item.severity, item.severity)}: {item.where}: {item.what} [{item.rule}]")
            lines.append(f"  fix: {item.fix}")
        word = style("valid", "good") if report.valid else style("not valid", ERROR)
        counts = count(report.diagnostics)
        lines.append(f"{report.path}: {word}{f' ({counts})' if counts else ''}")
    return "\n".join(lines)


def count(diagnostics: Sequence[Diagnostic]) -> str:
    """'1 error, 2 warnings', in words for people; '' for nothing."""
    words = {ERROR: "error", WARNING: "warning", INFO: "note"}
    parts = []
    for severity, word in words.items():
        number = sum(item.severity == severity for item in diagnostics)
        if number:
            parts.append(f"{number} {word}{'s' if number > 1 else ''}")
    return ", ".join(parts)


def as_json(reports: Sequence[FileReport]) -> str:
    """{"files": [{"path", "valid", "diagnostics": [{"rule", "severity", "where", "line", "column", "what", "fix"}]}]}"""
    keys = ("rule", "severity", "where", "line", "column", "what", "fix")
    files = [
        {
            "path": report.path,
            "valid": report.valid,
            "diagnostics": [{key: item.as_dict()[key] for key in keys} for item in report.diagnostics],
        }
        for report in reports
    ]
    return json.dumps({"files": files}, indent=2)


def as_github(reports: Sequence[FileReport]) -> str:
    """One workflow command for each finding: GitHub shows it at the line of the pull request."""
    commands = {ERROR: "error", WARNING: "warning", INFO: "notice"}
    lines = []
    for report in reports:
        for item in report.diagnostics:
            place = {"file": report.path, "line": item.line, "col": item.column, "title": item.rule}
            properties = ",".join(
                f"{key}={_escape(str(value), ',:')}" for key, value in place.items() if value is not None
            )
            message = _escape(f"{item.where}: {item.what}; fix: {item.fix}", "")
            lines.append(f"::{commands[item.severity]} {properties}::{message}")
    return "\n".join(lines)


def _escape(text: str, also: str) -> str:
    for character in "%\r\n" + also:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def as_sarif(reports: Sequence[FileReport]) -> str:
    """A SARIF 2.1.0 log: one run, the rules that were broken, one result for each finding."""
    broken = list(dict.fromkeys(item.rule for report in reports for item in report.diagnostics))
    results = [_sarif_result(report.path, item, broken) for report in reports for item in report.diagnostics]
    driver = {
        "name": "mooncake-v0",
        "version": __version__,
        "rules": [_sarif_rule(name) for name in broken],
    }
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _sarif_rule(name: str) -> Mapping[str, Any]:
    rule = RULES[name]
    return {
        "id": name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.explanation},
        "defaultConfiguration": {"level": SARIF_LEVELS[rule.severity]},
    }


def _sarif_result(path: str, item: Diagnostic, broken: list[str]) -> Mapping[str, Any]:
    from urllib.parse import quote  # only this format needs it

    location: dict[str, Any] = {"artifactLocation": {"uri": quote(path.encode("utf-8", "surrogateescape"))}}
    if item.line:
        location["region"] = {"startLine": item.line, "startColumn": item.column or 1}
    return {
        "ruleId": item.rule,
        "ruleIndex": broken.index(item.rule),
        "level": SARIF_LEVELS[item.severity],
        "message": {"text": f"{item.what}; fix: {item.fix}"},
        "locations": [{"physicalLocation": location, "logicalLocations": [{"fullyQualifiedName": item.where}]}],
    }
