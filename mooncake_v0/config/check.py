"""From the bytes of a mooncake.json to findings, and to a `MooncakeConfig` if none of them is an error.

bytes → text → `Document` (config.json_parser) → shape by the JSON Schema → rules (config.rules) → `Checked`. Nothing here
does I/O except `read_bytes`, and nothing raises for what a file holds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Iterator

from mooncake_v0.config.json_parser import parse
from mooncake_v0.config.model import MooncakeConfig
from mooncake_v0.config.rules import RULES, CheckOptions, Finding, Rule
from mooncake_v0.config.rules.registry import Subject, make_subject, where
from mooncake_v0.config.schema import shape_errors
from mooncake_v0.config.source import Document, Path, Problem
from mooncake_v0.errors import ERROR, CouldNotCheckError, Diagnostic

MAX_FILE_BYTES = 1 << 20
MAX_FINDINGS = 20
# problems of the text that leave no value to check at their place
VALUE_PROBLEMS = ("json-nan", "json-literal")


@dataclass(frozen=True)
class Found:
    """A finding with its rule and the diagnostic made of both."""

    rule: Rule
    finding: Finding
    diagnostic: Diagnostic


@dataclass(frozen=True)
class Checked:
    """The result of checking one text. `config` is None if and only if there is an error."""

    document: Document
    found: tuple[Found, ...]
    config: MooncakeConfig | None

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return tuple(item.diagnostic for item in self.found)


def read_bytes(path: str | FilePath) -> bytes:
    """The first MAX_FILE_BYTES + 1 bytes of a file. Raises CouldNotCheckError, naming the reason and what to do."""
    try:
        if FilePath(path).is_dir():
            raise CouldNotCheckError(f"{path} is a directory", fix="name the mooncake.json file in it")
        if FilePath(path).exists() and not FilePath(path).is_file():
            raise CouldNotCheckError(f"{path} is not a regular file", fix="name a file, or - for standard input")
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise CouldNotCheckError(f"{path} does not exist", fix="check the path (and MOONCAKE_CONFIG_PATH)") from error
    except PermissionError as error:
        fix = "run as the user that runs vLLM, or make the file readable for you"
        raise CouldNotCheckError(f"{path} may not be read: permission denied", fix=fix) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise CouldNotCheckError(f"{path} cannot be read: {reason}", fix="name a readable file") from error


def check_bytes(data: bytes, options: CheckOptions = CheckOptions()) -> Checked:
    """Check the bytes of a mooncake.json. Never raises."""
    document = to_document(data)
    subject = make_subject(document, options, shape_errors(document.value) if document.complete else ())
    found = sorted(_run(subject), key=_position)
    has_error = any(item.diagnostic.severity == ERROR for item in found)
    return Checked(document, _limited(found), None if has_error else to_config(subject))


def to_document(data: bytes) -> Document:
    """The parsed text; bytes that are no text become a document with the one problem."""
    if len(data) > MAX_FILE_BYTES:
        what = f"the file is larger than {MAX_FILE_BYTES} bytes; a mooncake.json has some 300"
        return _unreadable("file-too-large", what, "check the path: this is another file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else f"not UTF-8 (byte {error.start + 1})"
        return _unreadable("file-not-utf8", f"the file is {kind}", "give a JSON file, saved as UTF-8 text")
    if "\0" in text:
        return _unreadable(
            "file-not-utf8",
            "the file holds zero bytes: it is binary or UTF-16",
            "give a JSON file, saved as UTF-8 text",
        )
    return parse(text)


def _unreadable(rule: str, what: str, fix: str) -> Document:
    return Document("", problems=(Problem(rule, 0, (), what, fix),))


def _run(subject: Subject) -> Iterator[Found]:
    """All findings. A field with a syntax error is not looked at again; a `last` rule that finds something ends it."""
    failed: set[Path] = {problem.path for problem in subject.document.problems if problem.rule in VALUE_PROBLEMS}
    for rule in RULES.values():
        if rule.check is None:
            continue
        for finding in rule.check(subject.hiding(failed) if rule.syntax else subject.without(failed)):
            if rule.syntax and finding.path in failed:
                continue
            severity = finding.severity or rule.severity
            if severity == ERROR and rule.syntax:
                failed.add(finding.path)
            yield Found(rule, finding, to_diagnostic(rule, finding, subject.document))
            if rule.last:
                return


def _limited(found: list[Found]) -> tuple[Found, ...]:
    """At most MAX_FINDINGS of one rule; the last of them says how many more there are."""
    numbers = Counter(item.rule.name for item in found)
    seen: Counter[str] = Counter()
    kept = []
    for item in found:
        name = item.rule.name
        seen[name] += 1
        more = numbers[name] - MAX_FINDINGS
        if seen[name] == MAX_FINDINGS and more > 0:
            what = f"{item.diagnostic.what}, and {more} more findings of this kind"
            item = replace(item, diagnostic=replace(item.diagnostic, what=what))
        if seen[name] <= MAX_FINDINGS:
            kept.append(item)
    return tuple(kept)


def to_diagnostic(rule: Rule, finding: Finding, document: Document) -> Diagnostic:
    place = document.line_column(finding.offset) if finding.offset is not None else document.place(finding.path)
    line, column = place or (None, None)
    severity = finding.severity or rule.severity
    return Diagnostic(rule.name, severity, where(finding.path), finding.what, finding.fix, line, column)


def _position(item: Found) -> tuple[int, int]:
    return item.diagnostic.line or 0, item.diagnostic.column or 0


def to_config(subject: Subject) -> MooncakeConfig | None:
    """The model of a subject without errors; None if a part is missing, which then is an error found by a rule."""
    prefill, decode, metadata = subject.final["prefill"], subject.final["decode"], subject.metadata
    if prefill is None or decode is None or metadata is None:
        return None
    config = MooncakeConfig(prefill, decode, metadata.url, "tcp")
    return replace(config, protocol="rdma", device_names=subject.device_names) if subject.protocol == "rdma" else config
