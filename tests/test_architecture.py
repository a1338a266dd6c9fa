"""The import rules of the design, checked on the syntax tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "mooncake_v0"

# part of the package -> parts it may import (config means config.model: data only)
MAY_IMPORT = {
    "errors": set(),
    "at_once": set(),
    "url_parts": set(),
    "digits": set(),
    "fast_json": set(),
    "handoff": set(),
    "config": {"errors", "at_once", "url_parts", "digits"},
    "metadata": {"errors", "at_once", "url_parts", "fast_json", "digits"},
    "proxy": {"errors", "handoff", "metadata", "fast_json"},
    "migrate": {"errors", "config", "digits"},
    "doctor": {"errors", "config", "metadata"},
    "transfer": {"errors", "handoff", "config", "metadata"},
    "kv": {"errors", "transfer"},
    "bench": {"errors", "transfer", "kv", "config", "metadata"},
    "vllm_plugin": {"errors", "handoff", "fast_json", "config", "metadata", "transfer", "kv"},
    "pin": {"errors", "config", "transfer"},
    "cli": {
        "errors",
        "at_once",
        "fast_json",
        "digits",
        "config",
        "metadata",
        "proxy",
        "migrate",
        "doctor",
        "bench",
        "pin",
        "transfer",
    },
    "__main__": {"cli"},
}
# module from outside -> the only files or folders that may import it
ONLY_IN = {
    "mooncake": ("transfer/engine.py",),
    "vllm": ("vllm_plugin/", "bench/upstream_peer.py"),
    "torch": ("kv/", "vllm_plugin/", "bench/"),
    "zmq": ("transfer/", "vllm_plugin/engine_start.py"),
    "quart": ("proxy/",),
    "jsonschema": ("config/",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "pickle": (),
    "cloudpickle": (),
    "marshal": (),
}


def imported_modules(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, lazily too; relative imports are refused."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
    return found


SOURCES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_what_its_part_allows(path: Path) -> None:
    relative = path.relative_to(ROOT)
    part = relative.parts[0].removesuffix(".py")
    for name in imported_modules(path):
        top, _, rest = name.partition(".")
        if top == "mooncake_v0":
            target = rest.split(".")[0]
            assert target in ("", part) or target in MAY_IMPORT[part], f"{relative} imports {name}"
        elif top in ONLY_IN:
            assert relative.as_posix().startswith(ONLY_IN[top] or ("nowhere",)), f"{relative} imports {name}"


def test_only_the_command_line_prints() -> None:
    printing = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert [name for name in printing if not name.startswith(("cli/", "pin/"))] == []


def test_package_root_imports_nothing() -> None:
    assert imported_modules(ROOT / "__init__.py") == set()


FORBIDDEN = [r"recv_pyobj", r"send_pyobj", r"torch\.load\(", r"tcp://\*", r"""bind\([^)]*(0\.0\.0\.0|["']\*["'])"""]


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_nothing_is_unpickled_from_a_socket_or_bound_to_all_addresses(pattern: str) -> None:
    found = [path.name for path in SOURCES if re.search(pattern, path.read_text())]

    assert [name for name in found if name != "upstream_peer.py"] == []


def test_every_host_option_defaults_to_loopback() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "cli").glob("*.py"))

    defaults = re.findall(r'"--[a-z-]*host",\s*default="([^"]*)"', text)

    assert defaults and set(defaults) == {"127.0.0.1"}
