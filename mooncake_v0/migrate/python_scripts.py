"""Reads Python files by their syntax tree: proxies (the documented one, vLLM's, NIXL's toy proxy) and offline `LLM(...)`.

Called by `files`; nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

from mooncake_v0.migrate.records import Found, Place

_API_URL = re.compile(r"^https?://[^/\s]+(?::\d+)?(?=/v1|/?$)")


@dataclass(frozen=True)
class ProxyScript:
    """A proxy in Python.

    kind:      "documented" (forwards to two fixed addresses), "toy" (--prefiller-host ...), "v1" (--prefill, --decode)
    upstreams: addresses that it holds, in order of first use; prefill comes first in every published one
    port:      the port it listens on, where the text says so
    """

    kind: str
    upstreams: tuple[str, ...]
    port: str
    place: Place


def parse_proxy(text: str, place: Place) -> ProxyScript | None:
    """The proxy that a Python text is, or None."""
    tree = _parse(text)
    if tree is None:
        return None
    strings = [node.value for node in _in_order(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    urls = [match[0].rstrip("/") for match in map(_API_URL.match, strings) if match]
    port = _keyword(tree, "port")
    if any(flag in strings for flag in ("--prefiller-host", "--prefiller-hosts", "--prefiller-port")):
        return ProxyScript("toy", tuple(dict.fromkeys(urls)), port, place)
    if "transfer_id" in text and "do_remote_prefill" in text:
        return ProxyScript("v1", tuple(dict.fromkeys(urls)), port, place)
    serves = re.search(r"\b(?:quart|Quart|fastapi|FastAPI|aiohttp|flask|Flask)\b", text) is not None
    if serves and "max_tokens" in text and "completions" in text and (urls or "prefill" in text):
        return ProxyScript("documented", tuple(dict.fromkeys(urls)), port, place)
    return None


def note_python(text: str, file: str, found: Found) -> None:
    """Say of a Python file that is no proxy why it is not read further."""
    tree = _parse(text)
    if tree is None:
        found.note(Place(file), file, "not valid Python")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(keyword.arg == "kv_transfer_config" for keyword in node.keywords):
            what = f"{_name(node.func)}(..., kv_transfer_config=...)"
            found.note(Place(file, node.lineno), what, "an engine started from Python: convert its arguments by hand")
            return
    found.note(Place(file), file, "a Python file that is no proxy known here")


def _parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _in_order(tree: ast.AST) -> list[ast.expr]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _keyword(tree: ast.AST, name: str) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in ("run", "serve", "run_app"):
            for keyword in node.keywords:
                if keyword.arg == name and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return ""
