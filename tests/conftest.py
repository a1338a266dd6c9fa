"""How the suite is spread over two processes (scripts/test.sh).

Tests that share real instances or servers stay in one of them, the longest first; others go file by file. Each process
looks for free ports in a range of its own, since a port found free is taken only a moment later.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

from mooncake_v0.pin import processes

# a deadline would measure what else the machine does, not the code
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

TOGETHER = ("e2e", "soak", "transfer", "migrate", "deployment")  # in this order
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")

if WORKER:
    PORTS_EACH = len(processes.FREE_PORTS) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    FIRST = processes.FREE_PORTS.start + int(WORKER.removeprefix("gw")) * PORTS_EACH
    processes.FREE_PORTS = range(FIRST, FIRST + PORTS_EACH)


def group(nodeid: str) -> str:
    """What stays in one process: a folder that shares servers, or a file."""
    path = nodeid.split("::")[0]
    folder = path.split("/")[1] if "/" in path else path
    return folder if folder in TOGETHER else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = group(item.nodeid)
        return TOGETHER.index(name) if name in TOGETHER else len(TOGETHER)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The plugin's own loadgroup takes its groups from node ids, which pytest 9.2 does not let it change."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return ByGroup(config, log)
