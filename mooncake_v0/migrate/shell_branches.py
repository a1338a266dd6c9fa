"""Finds the alternatives of a script that serves several roles: `case "$1" in prefill) ...`, `if ... else ...`.

What follows the alternatives depends on the one that was taken, so `shell` reads such a script once for each of them. Only
the first place with alternatives that assign variables counts: it is the one that tells roles apart.
"""

from __future__ import annotations

from typing import Iterator

from tree_sitter import Node

MAX_BRANCHES = 6
_CLAUSES = ("elif_clause", "else_clause")


def branches(node: Node) -> list[list[Node]]:
    """The alternatives of an `if` with an `else` or of a `case`, each as its nodes; [] for anything else."""
    if node.type == "case_statement":
        items = [child for child in node.named_children if child.type == "case_item"]
        return [[item] for item in items] if len(items) > 1 else []
    if node.type == "if_statement":
        clauses = [child for child in node.named_children if child.type in _CLAUSES]
        first = [child for child in node.named_children if child.type not in _CLAUSES]
        return [first, *([clause] for clause in clauses)] if clauses else []
    return []


def first_choice(root: Node) -> Node | None:
    """The first node with alternatives of which at least two assign variables."""
    for node in _preorder(root):
        found = branches(node)
        if 1 < len(found) <= MAX_BRANCHES and sum(map(_assigns, found)) > 1:
            return node
    return None


def alternatives(choice: Node) -> list[list[Node]]:
    """The alternatives after which the script goes on: not the one that prints how to use it and exits."""
    return [
        nodes for nodes in branches(choice) if not any(_exits(inner) for node in nodes for inner in _preorder(node))
    ]


def _exits(node: Node) -> bool:
    return node.type == "command" and (node.text or b"").startswith((b"exit", b"usage"))


def _assigns(nodes: list[Node]) -> bool:
    return any(inner.type == "variable_assignment" for node in nodes for inner in _preorder(node))


def _preorder(root: Node, depth: int = 0) -> Iterator[Node]:
    yield root
    # a function's alternatives depend on how it is called
    if depth < 60 and root.type != "function_definition":
        for child in root.named_children:
            yield from _preorder(child, depth + 1)
