"""The JSON parser with places, held to the standard library's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_v0.config.json_parser import MAX_DEPTH, parse
from mooncake_v0.config.source import Document, render_path

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# texts near JSON: what a slip of the keyboard makes of it
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "{",
            "}",
            "[",
            "]",
            ":",
            ",",
            '"',
            "'",
            '"a"',
            '"b": 1',
            "1",
            "-",
            "0.5",
            "1e9",
            "01",
            "tru",
            "true",
            "null",
            "NaN",
        ]
        + [
            " ",
            "\n",
            "//c\n",
            "/*",
            "*/",
            "#",
            "\\",
            "\\u00",
            "\ufeff",
            "\u201c",
            "\u201d",
            "\0",
            "\x1f",
            "é",
            "\ud800",
        ]
    ),
    max_size=14,
).map("".join)


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_parses_what_json_writes_to_the_same_value(value: Any, indent: Any, ascii_only: bool) -> None:
    document = parse(json.dumps(value, indent=indent, ensure_ascii=ascii_only))

    assert document.problems == () and document.complete
    assert document.value == value


@settings(deadline=None)
@given(FRAGMENTS | st.text())
def test_agrees_with_the_standard_library_on_any_text(text: str) -> None:
    document = parse(text)

    if not document.problems:
        assert json.dumps(document.value) == json.dumps(json.loads(text))
    else:
        assert document.problems[0].rule in {"duplicate-key", "json-nan", "nested-too-deep"} or not is_json(text)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(VALUES)
def test_the_place_of_every_value_holds_that_value(value: Any) -> None:
    document = parse(json.dumps(value, indent=2))

    for path, span in document.spans.items():
        found = value
        for step in path:
            found = found[step]
        assert json.loads(document.text[span.start : span.end]) == found


@pytest.mark.parametrize(
    ("text", "rule", "line", "column"),
    [
        ('{\n  "a": 1,\n}', "json-trailing-comma", 2, 9),
        ('{\n  "a": 1\n  "b": 2\n}', "json-missing-comma", 3, 3),
        ('{\n  // one\n  "a": 1\n}', "json-comment", 2, 3),
        ('{\n  "a": 1,\n  "a": 2\n}', "duplicate-key", 3, 3),
        ('{\n  "a": NaN\n}', "json-nan", 2, 8),
        ('{\n  "a": "b\n}', "json-string", 2, 8),
        ('{\n  "a": tcp\n}', "json-quotes", 2, 8),
        ('{\n  "a": 1\n}\n{}', "json-trailing-text", 4, 1),
        ('{\n  "ä": 1,\n  "b" 2\n}', "json-syntax", 3, 7),
        ('{\n  "a": [1, 2', "json-truncated", 2, 13),
    ],
)
def test_problem_is_placed_where_it_is(text: str, rule: str, line: int, column: int) -> None:
    document = parse(text)

    assert [problem.rule for problem in document.problems] == [rule]
    assert document.line_column(document.problems[0].offset) == (line, column)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_deep_nesting_ends_with_a_problem_and_without_a_crash(opening: str) -> None:
    document = parse(opening * 100_000)

    assert [problem.rule for problem in document.problems] == ["nested-too-deep"]


def test_nesting_up_to_the_limit_is_read() -> None:
    assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH).problems == ()


def test_a_number_of_a_million_digits_takes_no_time() -> None:
    assert parse("1" * 1_000_000).value == float("inf")


def test_several_mistakes_are_all_reported() -> None:
    document = parse("{'a': True, // x\n \"b\": NaN,}")

    assert [problem.rule for problem in document.problems] == [
        "json-quotes",
        "json-literal",
        "json-comment",
        "json-nan",
        "json-trailing-comma",
    ]
    assert document.value["a"] is True


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "$"),
        (("a", 0), "$.a[0]"),
        (("a b",), "$['a b']"),
        (("\x1b[31m",), "$['\\x1b[31m']"),
        (("x" * 500,), "$." + "x" * 77 + "..."),
    ],
)
def test_path_is_rendered_short_and_without_control_characters(path: Any, text: str) -> None:
    assert render_path(path) == text


def test_place_of_a_missing_value_is_that_of_its_object() -> None:
    document: Document = parse('\n  {"a": 1}')

    assert document.place(("b",)) == (2, 3)
    assert parse("").place(("b",)) is None
