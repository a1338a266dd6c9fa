"""A pair of real agents with the real engine over every metadata backend, and what operators see of it there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Iterator

import pytest

from tests.metadata_backends import BACKENDS, Backend, start_backend
from tests.transfer.conftest import MIB, MakeAgents, agent_pid, wait_until

COMMAND = (sys.executable, "-m", "mooncake_v0", "metadata")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    with ExitStack() as stack:
        yield start_backend(request.param, tmp_path, stack)


@pytest.fixture
def metadata_url(backend: Backend) -> str:
    return backend.url


def test_entries_move_before_during_and_after_the_backends_fault(backend: Backend, make_agents: MakeAgents) -> None:
    agents = make_agents()
    agents.wait_connected()

    stored = [agents.store(1, MIB, fill=1)]
    fetched = [agents.fetch(1)]
    backend.fail()
    stored.append(agents.store(2, MIB, fill=2))
    fetched.append(agents.fetch(2))
    backend.recover()
    stored.append(agents.store(3, MIB, fill=3))
    fetched.append(agents.fetch(3))

    assert stored == ["", "", ""]
    assert fetched == [bytes([fill]) * MIB for fill in (1, 2, 3)]


def metadata(*words: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *words, "--format", "json"], capture_output=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("backend", ["redis", "etcd"], indirect=True)
def test_three_killed_agents_are_shown_stale_and_pruned_while_a_pair_goes_on(
    backend: Backend, make_agents: MakeAgents
) -> None:
    agents = make_agents()
    agents.wait_connected()
    victims = [make_agents(), make_agents()]
    clients = [victims[0].prefill, victims[0].decode, victims[1].prefill]
    for victim in victims:
        victim.wait_connected()
    dead = sorted(client.settings.ports.segment_name for client in clients)
    wait_until(lambda: len(metadata("ls", backend.url)["segments"]) == 6, "six segments")

    for client in clients:
        os.kill(agent_pid(client), signal.SIGKILL)
        client.close()  # before it starts another agent
    shown = {row["name"]: row["state"] for row in metadata("ls", backend.url)["segments"]}
    pruned = metadata("prune", backend.url, "--yes")
    stored, fetched = agents.store(1, MIB, fill=1), agents.fetch(1)
    left = {row["name"]: row["state"] for row in metadata("ls", backend.url)["segments"]}

    assert sorted(name for name, state in shown.items() if state == "stale") == dead
    assert [row["name"] for row in pruned["stale"]] == dead
    assert (stored, fetched) == ("", bytes([1]) * MIB)
    assert (len(left), set(left.values())) == (3, {"alive"})
