from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.vllm_plugin.guided_decoding import provide_airports


@pytest.fixture(autouse=True)
def no_airports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing of the name is imported, before and after; a folder from which it can be."""
    forget = [name for name in sys.modules if name.split(".")[0] == "pyairports"]
    for name in forget:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("pyairports", "pyairports.airports"):
        sys.modules.pop(name, None)


def airports() -> list[object]:
    found: list[object] = importlib.import_module("pyairports.airports").AIRPORT_LIST
    return found


def test_the_missing_package_is_there_and_empty() -> None:
    provide_airports()

    assert airports() == []


def test_the_placeholder_of_the_index_is_mended(no_airports: Path) -> None:
    (no_airports / "pyairports").mkdir()
    (no_airports / "pyairports" / "__init__.py").write_text("")

    provide_airports()

    assert airports() == []


def test_a_real_package_is_left_alone(no_airports: Path) -> None:
    (no_airports / "pyairports").mkdir()
    (no_airports / "pyairports" / "__init__.py").write_text("")
    (no_airports / "pyairports" / "airports.py").write_text("AIRPORT_LIST = [('Goroka', 'Papua', 'GKA')]")

    provide_airports()

    assert airports() == [("Goroka", "Papua", "GKA")]
