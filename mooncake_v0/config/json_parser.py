"""JSON text to values, with the place of every value and a name for every mistake.

`json.loads` stops at the first mistake, accepts NaN and duplicate keys, and forgets where a value stood. People write
configs by hand, so this parser reads on after what it understands (comments, a trailing comma, curly quotes, ...) and
names each. On text without a problem it gives what `json.loads` gives (a property test holds it to that).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from json import JSONDecodeError
from json import decoder as json_decoder
from typing import Any

from mooncake_v0.config.source import PLAIN_KEY, Document, Path, Problem, Span, shorten

MAX_DEPTH = 20
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
BLANK = re.compile(r"[ \t\r\n]*")
WORD = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*|-?Infinity", re.ASCII)
COMMENT = re.compile(r"(//|#)[^\n]*|/\*.*?\*/", re.DOTALL)
WORDS = {"true": True, "false": False, "null": None}
NEAR_WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null", "TRUE": "true", "FALSE": "false"}
OTHER_QUOTES = {"'": "'", "\u2018": "\u2019", "\u201c": "\u201d", "\u201d": "\u201d", "\u2019": "\u2019", "`": "`"}


def parse(text: str) -> Document:
    """The document in the text. Never raises."""
    parser = _Parser(text)
    complete = True
    value = None
    try:
        value = parser.document()
    except _StopParsing:
        complete = False
    problems = _merged(sorted(parser.problems, key=lambda problem: problem.offset))
    return Document(text, value, complete, problems, parser.spans)


def _merged(problems: list[Problem]) -> tuple[Problem, ...]:
    """Wrong quotes are wrong all over a file: one problem for each kind of them, at the first, with their number."""
    kinds = Counter(problem.fix for problem in problems if problem.rule == "json-quotes")
    kept: list[Problem] = []
    for problem in problems:
        number = kinds.pop(problem.fix, 0) if problem.rule == "json-quotes" else 1
        if number > 1:
            problem = replace(problem, what=f"{problem.what}, and {number - 1} more of that kind")
        if number:
            kept.append(problem)
    return tuple(kept)


class _StopParsing(Exception):
    """Nothing sensible can be read after this point; the reason is in `problems`."""


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.places = Document(text)
        self.at = 0
        self.path: Path = ()
        self.problems: list[Problem] = []
        self.spans: dict[Path, Span] = {}

    def report(self, rule: str, what: str, fix: str, offset: int | None = None) -> None:
        self.problems.append(Problem(rule, self.at if offset is None else offset, self.path, what, fix))

    def stop(self, rule: str, what: str, fix: str, offset: int | None = None) -> _StopParsing:
        self.report(rule, what, fix, offset)
        return _StopParsing()

    def document(self) -> Any:
        if self.text.startswith("\ufeff"):
            self.report("byte-order-mark", "the file starts with a byte order mark", "save it as UTF-8 without BOM")
            self.at = 1
        first = self.peek()
        if not first:
            raise self.stop("file-empty", "the file is empty", "write the six fields; see `mooncake-v0 schema`")
        if self.is_other_format(first):
            self.problems.clear()
            line = shorten(self.text[self.at :].split("\n", 1)[0], 60)
            fix = "give the JSON file that MOONCAKE_CONFIG_PATH names; it starts with {"
            raise self.stop("file-not-json", f"this is not JSON; it starts with {line!r}", fix)
        value = self.value()
        if self.peek():
            rest = shorten(self.text[self.at :].split("\n", 1)[0], 40)
            raise self.stop("json-trailing-text", f"text after the end of the JSON value: {rest!r}", "remove it")
        return value

    def is_other_format(self, first: str) -> bool:
        """Whether a text that starts like this was never meant to be JSON."""
        if first in '{["' or first in OTHER_QUOTES or NUMBER.match(self.text, self.at):
            return False
        word = WORD.match(self.text, self.at)
        return word is None or word[0] not in (*WORDS, *NEAR_WORDS, "NaN", "Infinity", "-Infinity")

    def peek(self) -> str:
        """The next character after blanks and comments, '' at the end."""
        while True:
            self.at = _end(BLANK, self.text, self.at)
            comment = COMMENT.match(self.text, self.at)
            if comment is None:
                return self.text[self.at : self.at + 1]
            self.report("json-comment", f"a comment: {shorten(comment[0], 40)!r}", "remove it; JSON has no comments")
            self.at = comment.end()

    def value(self, key_at: int | None = None) -> Any:
        first = self.peek()
        start = self.at
        if len(self.path) > MAX_DEPTH:
            fix = "write a flat object with the fields of `mooncake-v0 schema`"
            raise self.stop("nested-too-deep", f"more than {MAX_DEPTH} levels of nesting", fix)
        if first == "{":
            value: Any = self.object()
        elif first == "[":
            value = self.array()
        elif first == '"' or first in OTHER_QUOTES and first:
            value = self.string()
        else:
            value = self.scalar(first)
        self.spans[self.path] = Span(start if key_at is None else key_at, start, self.at)
        return value

    def object(self) -> dict[str, Any]:
        start = self.at
        self.at += 1
        members: dict[str, Any] = {}
        parent = self.path
        while not self.closes("}", start, bool(members)):
            key_at = self.at
            key = self.key()
            self.path = (*parent, key)
            if key in members:
                line, _ = self.places.line_column(self.spans[self.path].key)
                fix = "keep one of them; JSON readers silently take the last"
                self.report("duplicate-key", f"key {shorten(key)!r} was already given in line {line}", fix, key_at)
            if self.peek() != ":":
                fix = f'write "{shorten(key)}": and then the value'
                raise self.stop("json-syntax", f"no ':' after the key {shorten(key)!r}", fix)
            self.at += 1
            members[key] = self.value(key_at)
            self.path = parent
        return members

    def array(self) -> list[Any]:
        start = self.at
        self.at += 1
        items: list[Any] = []
        parent = self.path
        while not self.closes("]", start, bool(items)):
            self.path = (*parent, len(items))
            items.append(self.value())
            self.path = parent
        return items

    def closes(self, bracket: str, start: int, has_members: bool) -> bool:
        """Whether the container ends here; else the next member follows, and a comma between has been read."""
        following = self.peek()
        comma_at = self.at
        if following == "," and has_members:
            self.at += 1
            following = self.peek()
            if following == bracket:
                fix = f"remove the comma before the {bracket!r}"
                self.report("json-trailing-comma", "a comma after the last entry", fix, comma_at)
        elif following and following != bracket and has_members:
            if following != '"' and following not in OTHER_QUOTES:
                what = f"a ',' or {bracket!r} was expected here, found {following!r}"
                raise self.stop(
                    "json-syntax", what, "separate the entries with one comma each, and close every bracket"
                )
            self.report("json-missing-comma", "no comma between two entries", "put a comma after the entry before this")
        if not following:
            line, column = self.places.line_column(start)
            opened = self.text[start]
            what = f"the file ends before the {opened!r} of line {line}, column {column} is closed"
            raise self.stop(
                "json-truncated", what, f"add the missing {bracket!r}, or copy the file again: it may be cut"
            )
        if following == bracket:
            self.at += 1
            return True
        return False

    def key(self) -> str:
        if self.peek() == '"' or self.peek() in OTHER_QUOTES:
            return self.string()
        word = PLAIN_KEY.match(self.text, self.at)
        if word is None:
            found = self.peek()
            if found == ",":
                raise self.stop("json-syntax", "a comma too many", "remove it")
            raise self.stop(
                "json-syntax", f"a key in double quotes was expected here, found {found!r}", 'write "key": value'
            )
        self.report("json-quotes", f"the key {word[0]!r} has no quotes", f'write "{word[0]}"')
        self.at = word.end()
        return word[0]

    def string(self) -> str:
        quote = self.text[self.at]
        if quote != '"':
            return self.other_string(quote)
        try:
            value: str
            value, self.at = json_decoder.scanstring(self.text, self.at + 1, True)  # type: ignore[attr-defined]
        except JSONDecodeError as error:
            raise self.bad_string(error) from None
        return value

    def bad_string(self, error: JSONDecodeError) -> _StopParsing:
        if "Unterminated" in error.msg:
            fix = "close the string with a double quote in the same line"
            return self.stop("json-string", "a string is not closed", fix)
        found = self.text[error.pos : error.pos + 1]
        if "escape" in error.msg:
            what, fix = "a backslash that is not an escape", "write \\\\ for a backslash"
            return self.stop("json-string", f"{what}: {self.text[error.pos : error.pos + 6]!r}", fix, error.pos)
        if found in "\r\n":
            return self.stop(
                "json-string", "a string is not closed in its line", "close it with a double quote", self.at
            )
        what = f"a control character inside a string: {found!r}"
        return self.stop("json-string", what, "remove it", error.pos)

    def other_string(self, quote: str) -> str:
        end = self.text.find(OTHER_QUOTES[quote], self.at + 1)
        line_end = self.text.find("\n", self.at)
        if end < 0 or 0 <= line_end < end:
            raise self.stop("json-quotes", f"a string starts with {quote!r}", 'use straight double quotes: "')
        value = self.text[self.at + 1 : end]
        self.report("json-quotes", f"a string in {quote!r} quotes: {shorten(value)!r}", 'use straight double quotes: "')
        self.at = end + 1
        return value

    def scalar(self, first: str) -> Any:
        if not first:
            raise self.stop(
                "json-truncated", "the file ends where a value was expected", "copy the file again: it may be cut"
            )
        number = NUMBER.match(self.text, self.at)
        if number and not self.text[number.end() : number.end() + 1].isalnum():
            self.at = number.end()
            return _number(number[0])
        word = WORD.match(self.text, self.at)
        if word is None:
            raise self.stop(
                "json-syntax", f"a value was expected here, found {first!r}", "write a text in double quotes"
            )
        return self.word(word[0])

    def word(self, word: str) -> Any:
        start = self.at
        if word in WORDS:
            self.at += len(word)
            return WORDS[word]
        if word in ("NaN", "Infinity", "-Infinity"):
            self.report("json-nan", f"{word} is not JSON", "write a value in double quotes")
            self.at += len(word)
            return float(word.replace("Infinity", "inf"))
        if word in NEAR_WORDS:
            self.report("json-literal", f"{word} is not JSON", f"write {NEAR_WORDS[word]}")
            self.at += len(word)
            return WORDS[NEAR_WORDS[word]]
        raise self.stop("json-quotes", f"a text without quotes: {shorten(word)!r}", "put it in double quotes", start)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _number(text: str) -> int | float:
    """As json.loads; an integer of hundreds of digits becomes a float, since int() would refuse or take long."""
    if len(text) > 300 or not text.lstrip("-").isdigit():
        return float(text)
    return int(text)
