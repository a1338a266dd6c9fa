"""How the suite is spread over two processes (scripts/test.sh).

Tests that share real instances or servers stay in one of them, the longest first; others go file by file. Each process
looks for free ports in a range of its own, since a port found free is taken only a moment later.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake_v0.pin import processes

TOGETHER = ("e2e", "transfer", "migrate", "deployment")
ROOT = Path(__file__).parent
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")

if WORKER:
    PORTS_EACH = len(processes.FREE_PORTS) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    FIRST = processes.FREE_PORTS.start + int(WORKER.removeprefix("gw")) * PORTS_EACH
    processes.FREE_PORTS = range(FIRST, FIRST + PORTS_EACH)


def group(item: pytest.Item) -> str:
    path = item.path.relative_to(ROOT)
    return path.parts[0] if path.parts[0] in TOGETHER else str(path)


@pytest.hookimpl(tryfirst=True)  # before the plugin reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: group(item) not in TOGETHER)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
