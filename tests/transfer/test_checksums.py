"""A checksum per entry between two real agents: equal bytes pass, a changed byte is never used."""

from __future__ import annotations

import pytest

from mooncake_v0.transfer.agent_settings import AUTO, OFF, ON
from mooncake_v0.transfer.checksums import MAX_COST, Cost, is_wanted
from mooncake_v0.transfer.decode_side import MIN_PART_BYTES, PART_BYTES
from tests.freezing import frozen
from tests.transfer.conftest import MIB, Agents, MakeAgents, agent_pid, key, wait_until


@pytest.fixture
def checking(make_agents: MakeAgents) -> Agents:
    agents = make_agents(checksum=ON, pool_nbytes=PART_BYTES + 32 * MIB)
    agents.wait_connected()
    return agents


@pytest.mark.parametrize("nbytes", [1, MIB, PART_BYTES + MIN_PART_BYTES + 17], ids=["a byte", "one part", "two parts"])
def test_an_entry_with_the_right_checksum_is_used(checking: Agents, nbytes: int) -> None:
    assert checking.store(1, nbytes, fill=5) == ""

    assert checking.fetch(1, wait_s=20.0) == bytes([5]) * nbytes

    assert checking.decode.status().counters["checked"] == 1
    assert checking.prefill.status().counters["checksums"] == 1


def store_and_change_a_byte(agents: Agents) -> None:
    """Decode sleeps until prefill has hashed the entry and a byte of it was changed."""
    with frozen(agent_pid(agents.decode)):
        reserved = agents.prefill.reserve([key(1)], [MIB])
        start = reserved.offsets[0]
        agents.prefill.pool.map[start : start + MIB] = bytes(MIB)
        before = agents.prefill.status().counters.get("checksums", 0)
        agents.prefill.commit([key(1)], [MIB])
        wait_until(lambda: agents.prefill.status().counters.get("checksums", 0) > before or not is_checking(agents))
        agents.prefill.pool.map[start + 4711] = 1


def fetch_from_peer(agents: Agents) -> bytes | str:
    """On a slow host prefill may have taken the sleeping decode for dead: then they meet again first."""
    found: list[bytes | str] = []
    wait_until(lambda: found.append(agents.fetch(1, wait_s=20.0)) or found[-1] not in ("no_peer", "unknown"))
    return found[-1]


def is_checking(agents: Agents) -> bool:
    return agents.prefill.settings.checksum == ON


def test_a_changed_byte_is_not_used_and_the_next_entry_is(checking: Agents) -> None:
    store_and_change_a_byte(checking)

    assert fetch_from_peer(checking) == "corrupt"

    assert checking.decode.status().counters["corrupt"] == 1
    assert checking.store(2, MIB, fill=2) == ""
    assert checking.fetch(2) == bytes([2]) * MIB


def test_without_checksums_the_byte_would_have_been_used(make_agents: MakeAgents) -> None:
    """Shows that the test above can fail."""
    agents = make_agents(checksum=OFF)
    agents.wait_connected()
    store_and_change_a_byte(agents)

    assert fetch_from_peer(agents) == bytes(4711) + b"\1" + bytes(MIB - 4712)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_side_without_checksums_is_no_obstacle(make_agents: MakeAgents, side: str) -> None:
    agents = make_agents(checksum=ON, **{side: {"checksum": OFF}})
    agents.wait_connected()

    agents.store(1, MIB, fill=1)

    assert agents.fetch(1) == bytes([1]) * MIB
    assert agents.decode.status().counters.get("checked", 0) == 0


def test_a_mapped_pool_has_nothing_to_check(make_agents: MakeAgents) -> None:
    agents = make_agents(checksum=ON, transport=AUTO)
    agents.wait_connected()

    agents.store(1, MIB, fill=1)

    assert agents.fetch(1) == bytes([1]) * MIB
    assert agents.decode.status().counters.get("checked", 0) == 0


def test_auto_is_off_where_it_would_take_cores_from_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpus, protocol, wanted in ((2, "tcp", False), (4, "tcp", True), (64, "rdma", False)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cpus=cpus: set(range(cpus)))
        assert is_wanted(AUTO, protocol) is wanted
        assert is_wanted(ON, protocol) and not is_wanted(OFF, protocol)


def test_a_cost_over_the_limit_is_told_once_there_is_enough_to_judge_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    cost = Cost()

    assert not cost.add(0.5, 99.0)
    assert cost.add(0.6, 99.0)

    cheap = Cost()
    assert not any(cheap.add(0.5, 100.0 - 0.4 * MAX_COST) for _ in range(10))
