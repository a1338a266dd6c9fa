"""Rules about the bytes and the JSON text. The parser (`config.json_parser`) finds these; here they are explained."""

from __future__ import annotations

from typing import Iterator

from mooncake_v0.config.rules.registry import Finding, Subject, rule
from mooncake_v0.errors import ERROR


@rule(ERROR)
def file_empty(subject: Subject) -> Iterator[Finding]:
    """The file holds nothing.

    Often a config map or a template that was not filled in, or a disk that was full when the file was written.
    """
    return subject.problems("file-empty")


@rule(ERROR)
def file_too_large(subject: Subject) -> Iterator[Finding]:
    """The file is larger than 1 MiB; a mooncake.json has some 300 bytes.

    Only the first MiB is ever read. Probably another file's path was given.
    """
    return subject.problems("file-too-large")


@rule(ERROR)
def file_not_utf8(subject: Subject) -> Iterator[Finding]:
    """The bytes are not UTF-8 text.

    Some Windows editors write UTF-16 ("Unicode"); a compressed or binary file ends here too. JSON is UTF-8.
    """
    return subject.problems("file-not-utf8")


@rule(ERROR)
def file_not_json(subject: Subject) -> Iterator[Finding]:
    """The file is text of another kind: YAML, a shell script, HTML, an ini file.

    The V0 connector reads JSON only. The YAML files of the Mooncake Store, of LMCache or of Kubernetes are other
    products' files; a Kubernetes ConfigMap must be unpacked to the JSON inside it.
    """
    return subject.problems("file-not-json")


@rule(ERROR)
def byte_order_mark(subject: Subject) -> Iterator[Finding]:
    """The file starts with the bytes EF BB BF, a byte order mark that some Windows editors add.

    It is invisible in an editor, and Python's json module refuses the file because of it.
    """
    return subject.problems("byte-order-mark")


@rule(ERROR)
def json_syntax(subject: Subject) -> Iterator[Finding]:
    """The text is not JSON at this place.

    JSON here means one object: { "key": "value", ... }, keys and texts in double quotes, entries separated by commas.
    """
    return subject.problems("json-syntax")


@rule(ERROR)
def json_comment(subject: Subject) -> Iterator[Finding]:
    """A comment (// or /* */ or #). JSON has none, and Python's json module refuses the whole file.

    Keep the remark in a file beside it or in version control.
    """
    return subject.problems("json-comment")


@rule(ERROR)
def json_trailing_comma(subject: Subject) -> Iterator[Finding]:
    """A comma after the last entry. JavaScript and YAML allow it, JSON does not."""
    return subject.problems("json-trailing-comma")


@rule(ERROR)
def json_missing_comma(subject: Subject) -> Iterator[Finding]:
    """Two entries without a comma between them; mostly a line that was added at the end."""
    return subject.problems("json-missing-comma")


@rule(ERROR)
def json_quotes(subject: Subject) -> Iterator[Finding]:
    """A text or key without quotes, or in quotes other than the straight double quote.

    Web pages and chat programs turn straight quotes into curly ones; single quotes are Python's, not JSON's.
    """
    return subject.problems("json-quotes")


@rule(ERROR)
def json_string(subject: Subject) -> Iterator[Finding]:
    """A string that is not closed in its line, or that holds a control character or an unknown backslash escape."""
    return subject.problems("json-string")


@rule(ERROR)
def json_truncated(subject: Subject) -> Iterator[Finding]:
    """The file ends before its last bracket is closed: it was cut while copying, or a bracket is missing."""
    return subject.problems("json-truncated")


@rule(ERROR)
def json_trailing_text(subject: Subject) -> Iterator[Finding]:
    """Something follows the JSON value: a second object, or the prompt of a terminal that was copied along."""
    return subject.problems("json-trailing-text")


@rule(ERROR)
def json_literal(subject: Subject) -> Iterator[Finding]:
    """True, False or None, as Python prints them. JSON writes true, false and null."""
    return subject.problems("json-literal")


@rule(ERROR)
def json_nan(subject: Subject) -> Iterator[Finding]:
    """NaN or Infinity. Python's json module reads them, other JSON readers refuse the file, and no field needs one."""
    return subject.problems("json-nan")


@rule(ERROR)
def duplicate_key(subject: Subject) -> Iterator[Finding]:
    """One key is given twice. JSON readers silently take the last value, which may not be the one you look at."""
    return subject.problems("duplicate-key")


@rule(ERROR)
def nested_too_deep(subject: Subject) -> Iterator[Finding]:
    """More than 20 levels of brackets. A mooncake.json is flat, so this is some other file, or a damaged one."""
    return subject.problems("nested-too-deep")
