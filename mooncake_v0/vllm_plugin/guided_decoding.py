"""Mends guided decoding with outlines, this vLLM's default: what PyPI has under the name pyairports today is empty.

outlines before 0.1 imports `pyairports.airports` for a type that vLLM never uses (outlines/types/airports.py). The real
package is gone, so every guided request would end with status 500. Called only where a KV transfer is configured, in the
server's, the engine's and every worker's process: each of them imports outlines.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def provide_airports() -> None:
    """Make ``from pyairports.airports import AIRPORT_LIST`` work, with an empty list, unless it works already."""
    try:
        importlib.import_module("pyairports.airports")
    except ImportError:
        package, airports = ModuleType("pyairports"), ModuleType("pyairports.airports")
        package.__path__ = []
        package.airports = airports  # type: ignore[attr-defined]
        airports.AIRPORT_LIST = []  # type: ignore[attr-defined]
        sys.modules.update({"pyairports": package, "pyairports.airports": airports})
