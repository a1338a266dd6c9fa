"""Turns the words of a bash syntax tree into text, the way bash would, as far as that is possible without running it.

Used by `shell` only. A word gives a list, because `"${ARRAY[@]}"` and unquoted variables may give several or no words.
What is not known stays in the text as `${NAME}`, `$(...)` or `$((...))`.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Callable, Mapping

from tree_sitter import Node

from mooncake_v0.migrate.records import Lookup, no_lookup

_ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "0": "\0", "a": "\a", "b": "\b", "e": "\x1b"}
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution")


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_LARGEST = 10**9


def integer(expression: str) -> int | None:
    """The value of a sum or product of small integers, None for anything else; nothing is evaluated by Python."""
    if not re.fullmatch(r"[0-9+\-*() ]{1,100}", expression) or "**" in expression:
        return None
    try:
        return _integer(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < _LARGEST:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
        if abs(result) < _LARGEST:
            return result
    raise ValueError("not a sum or product of small integers")


class Words:
    """The words of one source text, over a shell's variables."""

    def __init__(self, source: bytes, variables: Mapping[str, list[str]], lookup: Lookup = no_lookup):
        self.source = source
        self.variables = variables
        self.lookup = lookup

    def text(self, node: Node) -> str:
        return self.source[node.start_byte : node.end_byte].decode(errors="replace")

    def assignment(self, node: Node) -> tuple[str, list[str], bool]:
        """Name, values and whether it appends, of NAME=VALUE, NAME+=VALUE and NAME=(a b)."""
        name_node, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = self.text(name_node).split("[")[0] if name_node is not None else ""
        append = (
            b"+=" in self.source[node.start_byte : value_node.start_byte if value_node is not None else node.end_byte]
        )
        if value_node is None:
            return name, [""], append
        if value_node.type == "array":
            return name, [word for child in value_node.named_children for word in self.value(child)], append
        return name, [" ".join(self.value(value_node, quoted=True))], append

    def value(self, node: Node, *, quoted: bool = False) -> list[str]:
        """The words that a node gives; quoted means that spaces in a variable do not split it."""
        kind = node.type
        if kind == "comment":
            return []
        if kind == "word":
            return [re.sub(r"\\(.)", r"\1", self.text(node).replace("\\\n", ""), flags=re.DOTALL)]
        if kind == "raw_string":
            return [self.text(node)[1:-1]]
        if kind == "ansi_c_string":
            return [re.sub(r"\\(.)", lambda m: _ANSI.get(m[1], m[0]), self.text(node)[2:-1], flags=re.DOTALL)]
        if kind in ("string", "translated_string"):
            return self._string(node)
        if kind == "concatenation":
            parts = ["".join(self.value(child, quoted=True)) for child in node.children]
            return ["".join(parts)]
        if kind in _EXPANSIONS:
            return self._expanded(node, quoted)
        if kind in ("number", "variable_name", "test_operator", "special_variable_name", "extglob_pattern", "regex"):
            return [self.text(node)]
        return [self.text(node)]

    def _expanded(self, node: Node, quoted: bool) -> list[str]:
        values = self.expansion(node)
        if quoted or any("$" in value for value in values):
            return [" ".join(values)] if quoted else values
        return [word for value in values for word in value.split()]

    def _string(self, node: Node) -> list[str]:
        expansions = [child for child in node.named_children if child.type in _EXPANSIONS]
        start = node.start_byte + self.source[node.start_byte : node.end_byte].find(b'"') + 1
        ends = self.source[node.end_byte - 1 : node.end_byte] == b'"' and node.end_byte - 1 >= start
        end = node.end_byte - 1 if ends else node.end_byte
        whole = [child for child in expansions if child.start_byte == start and child.end_byte == end]
        if whole and ("[@]" in self.text(whole[0]) or self.text(whole[0]) in ("$@", "${@}")):
            return self.expansion(whole[0])
        return [self.gaps(node, start, end)]

    def gaps(self, node: Node, start: int, end: int) -> str:
        """Text between two bytes of a double-quoted string or here document, with its expansions replaced."""
        parts: list[str] = []
        position = start
        for child in node.named_children:
            if child.type in _EXPANSIONS and child.start_byte >= position:
                parts.append(self._unescaped(position, child.start_byte))
                parts.append(" ".join(self.expansion(child)))
                position = child.end_byte
        parts.append(self._unescaped(position, end))
        return "".join(parts)

    def _unescaped(self, start: int, end: int) -> str:
        text = self.source[start:end].decode(errors="replace").replace("\\\n", "")
        return re.sub(r'\\([\\"$`])', r"\1", text)

    def expansion(self, node: Node) -> list[str]:
        """Values of `$NAME` and `${NAME...}`; anything that must be run stays as written."""
        text = self.text(node)
        if node.type == "command_substitution":
            return [self._content(text)]
        if node.type == "arithmetic_expansion":
            return [self._arithmetic(text)]
        match = re.fullmatch(r"\$\{?([A-Za-z_][A-Za-z0-9_]*|[0-9@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?\}?", text, re.DOTALL)
        if node.type not in ("simple_expansion", "expansion") or not match:
            return [text]
        name, sign = match[1], match[3]
        known = name in self.variables
        empty = not known or (self.variables[name] == [""] and str(sign).startswith(":"))
        if sign and sign[-1] in "-=" and empty:
            return [self._default(node, match[4])]
        if sign and sign[-1] == "+":
            return [self._default(node, match[4])] if not empty else [""]
        if known:
            return list(self.variables[name])
        return [f"${{{name}}}"]

    def _content(self, text: str) -> str:
        """`$(cat FILE)` and `$(< FILE)` of a file that was given; any other command stays as written."""
        match = re.fullmatch(r"\$\(\s*(?:cat|<)\s*([\w./-]+)\s*\)", text)
        file = self.lookup(match[1]) if match else None
        return text if file is None else file.text.rstrip("\n")

    def _arithmetic(self, text: str) -> str:
        """Sums and products of integers and known variables; anything else stays as written."""

        def known(match: re.Match[str]) -> str:
            return " ".join(self.variables.get(match[1], [match[0]]))

        expression = re.sub(r"\$?\{?\b([A-Za-z_][A-Za-z0-9_]*|(?<=\$)[0-9])\}?", known, text[3:-2])
        result = integer(expression)
        return text if result is None else str(result)

    def _default(self, node: Node, text: str) -> str:
        inner = [
            child
            for child in node.named_children
            if child.type not in ("variable_name", "subscript", "special_variable_name")
        ]
        return (
            " ".join(word for child in inner for word in self.value(child, quoted=True)) if inner else text.rstrip("}")
        )
