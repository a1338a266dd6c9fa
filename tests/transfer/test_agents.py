"""Two agents and the real engine: entries move, faults are misses, and everything recovers by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.metadata.registry import INSTANCE_PREFIX
from mooncake_v0.metadata.store import open_store
from mooncake_v0.pin.processes import find_free_port, find_free_range
from mooncake_v0.transfer.agent_settings import ENGINE, SHM
from mooncake_v0.transfer.messages import Status
from mooncake_v0.transfer.status import query_status
from tests.engine_child import Engine
from tests.freezing import freeze, frozen, thaw
from tests.transfer.conftest import (
    MIB,
    POOL_BYTES,
    Agents,
    MakeAgents,
    agent_pid,
    key,
    listening_addresses,
    wait_until,
)

SIZES = [1, 799, 4096, 4097, MIB, 33 * MIB + 17]


@pytest.mark.parametrize("nbytes", SIZES)
def test_entry_arrives_as_it_was_stored(shared_agents: Agents, nbytes: int) -> None:
    assert shared_agents.store(nbytes, nbytes, fill=nbytes % 251) == ""

    assert shared_agents.fetch(nbytes) == bytes([nbytes % 251]) * nbytes
    assert shared_agents.fetch(nbytes) == bytes([nbytes % 251]) * nbytes


def test_unknown_key_is_a_miss_at_once(shared_agents: Agents) -> None:
    started = time.monotonic()

    assert shared_agents.fetch(999_999, wait_s=10.0) == "unknown"
    assert time.monotonic() - started < 5.0


def test_announced_entry_is_waited_for_and_only_up_to_the_deadline(shared_agents: Agents) -> None:
    shared_agents.prefill.reserve([key(50)], [4096])

    assert shared_agents.fetch(50, wait_s=0.3) == "late"

    shared_agents.prefill.commit([key(50)], [4096])
    assert isinstance(shared_agents.fetch(50), bytes)


def test_aborted_entry_ends_the_wait(shared_agents: Agents) -> None:
    shared_agents.prefill.reserve([key(51)], [4096])
    wait_until(lambda: shared_agents.decode.status().counters.get("lost", 0) >= 0)

    shared_agents.prefill.abort([key(51)])

    assert shared_agents.fetch(51, wait_s=5.0) in ("failed", "unknown")


def test_key_that_decode_still_holds_is_not_sent_again(shared_agents: Agents) -> None:
    shared_agents.store(60, MIB, fill=6)
    shared_agents.fetch(60)
    before = shared_agents.decode.status().counters["reads"]

    assert shared_agents.store(60, MIB, fill=7) in ("held", "exists")

    assert shared_agents.fetch(60) == bytes([6]) * MIB
    assert shared_agents.decode.status().counters["reads"] == before


def commit_part(agents: Agents, number: int, nbytes: int, ready_nbytes: int) -> int:
    """Reserve an entry, write all its bytes and offer only the leading ones; its offset."""
    start = agents.prefill.reserve([key(number)], [nbytes]).offsets[0]
    agents.prefill.pool.map[start : start + nbytes] = bytes([number]) * nbytes
    agents.prefill.commit([key(number)], [ready_nbytes])
    return start


def test_layers_that_are_ready_are_read_while_others_are_not(agents: Agents) -> None:
    nbytes = 40 * MIB + 5
    commit_part(agents, 1, nbytes, 17 * MIB)
    wait_until(lambda: agents.decode.status().counters.get("read_bytes", 0) == 17 * MIB, "the leading part is read")
    assert agents.fetch(1, wait_s=0.2) == "late"

    agents.prefill.commit([key(1)], [18 * MIB])  # too little for a read of its own
    agents.prefill.commit([key(1)], [nbytes])

    assert agents.fetch(1) == bytes([1]) * nbytes
    assert agents.decode.status().counters["reads"] == 2


def test_an_entry_that_ends_half_way_is_never_used(agents: Agents) -> None:
    commit_part(agents, 1, 40 * MIB, 20 * MIB)
    wait_until(lambda: agents.decode.status().counters.get("read_bytes", 0) == 20 * MIB, "the leading part is read")

    agents.prefill.abort([key(1)])

    assert agents.fetch(1, wait_s=20.0) in ("failed", "unknown")
    wait_until(lambda: agents.decode.status().buffer_bytes == 0, "its space is given back")


def test_entry_larger_than_the_buffer_is_refused_and_the_next_one_moves(agents: Agents) -> None:
    assert agents.store(1, 2 * POOL_BYTES, fill=1) == "too_large"
    assert agents.fetch(1) == "unknown"
    assert agents.prefill.restarts == 0

    assert agents.store(2, MIB, fill=2) == ""
    assert agents.fetch(2) == bytes([2]) * MIB


def test_full_buffers_evict_and_never_exceed_their_limit(agents: Agents) -> None:
    for number in range(1, 13):
        assert agents.store(number, 10 * MIB, fill=number) == ""
        assert agents.fetch(number) == bytes([number]) * 10 * MIB
        assert agents.decode.status().buffer_bytes <= POOL_BYTES
        assert agents.prefill.status().buffer_bytes <= POOL_BYTES

    assert agents.decode.status().counters["evicted"] >= 6
    assert agents.fetch(12) == bytes([12]) * 10 * MIB


def test_entry_that_decode_evicted_is_fetched_again_from_prefill(make_agents: MakeAgents) -> None:
    agents = make_agents(decode={"pool_nbytes": 4 * MIB})
    agents.wait_connected()
    for number in (1, 2):
        agents.store(number, 3 * MIB, fill=number)
        assert agents.fetch(number) == bytes([number]) * 3 * MIB

    assert agents.fetch(1) == bytes([1]) * 3 * MIB


def test_entries_expire(make_agents: MakeAgents) -> None:
    agents = make_agents(ttl_s=0.5)
    agents.wait_connected()
    agents.store(1, MIB, fill=1)
    agents.fetch(1)

    wait_until(lambda: agents.decode.status().entries == 0 and agents.prefill.status().entries == 0)
    for client in (agents.prefill, agents.decode):
        wait_until(lambda client=client: not any(client.pool.map[: MIB + 4096]), "expired bytes are cleared")  # type: ignore[misc]

    assert agents.fetch(1) == "unknown"
    assert agents.decode.status().counters["expired"] == 1


DISAGREEMENTS: list[tuple[dict[str, Any], str]] = [
    ({"fingerprint": {"model": "other"}}, "model differs"),
    ({"tp_size": 2}, "tp_size differs"),
]


def test_without_a_peer_nobody_is_asked(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = make_agents(decode={"fingerprint": {"model": "other"}})
    wait_until(lambda: "model differs" in getattr(agents.status("decode"), "peer", ""))
    for client in (agents.prefill, agents.decode):
        monkeypatch.setattr(client, "_call", None)

    assert agents.store(1, MIB, fill=1) == "no_peer"
    assert agents.fetch(1) == "no_peer"
    assert agents.decode.poll([key(1)], 5.0).settled == [True]


@pytest.mark.parametrize(("change", "sentence"), DISAGREEMENTS, ids=["model", "tp"])
def test_disagreement_names_the_field_on_both_sides(
    make_agents: MakeAgents, change: dict[str, Any], sentence: str
) -> None:
    agents = make_agents(decode=change)

    wait_until(lambda: sentence in getattr(agents.status("decode"), "peer", ""))
    wait_until(lambda: sentence in getattr(agents.status("prefill"), "peer", ""))

    assert agents.store(1, MIB, fill=1) == "no_peer"
    assert agents.fetch(1) == "no_peer"


def test_different_mooncake_json_is_named(make_agents: MakeAgents, metadata_url: str) -> None:
    agents = make_agents()
    agents.wait_connected()
    agents.decode.close()
    config = agents.prefill.settings.config
    other = replace(config, metadata_server=metadata_url + "/")
    late = make_agents(
        decode={"config": other}, prefill={"config": replace(config, prefill=Endpoint("127.0.0.1", 1024))}
    )

    wait_until(lambda: "config_digest differs" in getattr(late.status("decode"), "peer", ""))
    assert "different mooncake.json" in late.decode.status().peer


@pytest.mark.parametrize("transport", [ENGINE, SHM])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_agent_is_replaced_and_transfers_resume(make_agents: MakeAgents, victim: str, transport: str) -> None:
    agents = make_agents(transport=transport)
    agents.wait_connected()
    agents.store(1, MIB, fill=1)
    agents.fetch(1)
    client = agents.prefill if victim == "prefill" else agents.decode

    os.kill(agent_pid(client), signal.SIGKILL)

    wait_until(lambda: client.restarts == 1)
    agents.wait_connected()
    wait_until(lambda: agents.store(2, MIB, fill=2) == "")
    assert agents.fetch(2) == bytes([2]) * MIB
    assert agents.decode.status().transport == transport


def test_frozen_agent_of_the_worker_is_given_up_in_time_and_replaced(agents: Agents) -> None:
    old = agent_pid(agents.decode)
    with frozen(old):
        started = time.monotonic()
        with pytest.raises(AgentUnavailableError):
            agents.decode.select([key(1)], 0.5)
        assert time.monotonic() - started < 5.0
        wait_until(lambda: agents.decode.restarts == 1)

        agents.wait_connected()

    assert agent_pid(agents.decode) != old


def test_frozen_peer_is_a_miss_in_time_and_a_peer_again_afterwards(agents: Agents) -> None:
    agents.store(1, 30 * MIB, fill=1)
    with frozen(agent_pid(agents.prefill)):
        started = time.monotonic()
        result = agents.fetch(2, wait_s=3.0)
        assert result in ("no_peer", "unknown", "late")
        assert time.monotonic() - started < 10.0
        wait_until(lambda: "silent" in agents.decode.status().peer)
        assert agents.fetch(3, wait_s=3.0) == "no_peer"

    agents.wait_connected()
    wait_until(lambda: agents.store(4, MIB, fill=4) == "")
    assert agents.fetch(4) == bytes([4]) * MIB


def test_a_read_that_stalls_gives_its_space_back(agents: Agents) -> None:
    with frozen(agent_pid(agents.prefill)):
        with frozen(agent_pid(agents.decode)):
            thaw(agent_pid(agents.prefill))
            agents.store(1, 30 * MIB, fill=1)
            agents.prefill.status()
            time.sleep(0.5)  # the offer is on its way to decode
            freeze(agent_pid(agents.prefill))
        wait_until(lambda: agents.decode.status().counters.get("read_failed"), "the read is given up")

        status = agents.decode.status()
        assert (status.buffer_bytes, status.counters["quarantined_bytes"], agents.decode.restarts) == (0, 0, 0)


def test_agents_end_with_their_worker_and_remove_their_keys(make_agents: MakeAgents, metadata_url: str) -> None:
    agents = make_agents()
    agents.wait_connected()
    store = open_store(metadata_url)
    names = [client.settings.ports.segment_name for client in (agents.prefill, agents.decode)]
    keys = [prefix + name for name in names for prefix in ("mooncake/ram/", "mooncake/rpc_meta/", INSTANCE_PREFIX)]
    wait_until(lambda: all(store.get(name) is not None for name in keys))

    agents.prefill.close()
    os.kill(agent_pid(agents.decode), signal.SIGTERM)

    wait_until(lambda: store.get(keys[0]) is None and store.get(keys[1]) is None and store.get(keys[2]) is None)
    wait_until(lambda: agents.decode.restarts == 1)


def test_client_that_is_closed_while_its_agent_starts_leaves_no_process(make_agents: MakeAgents) -> None:
    agents = make_agents()
    started = time.monotonic()

    agents.prefill.close()
    agents.decode.close()

    assert time.monotonic() - started < 10.0
    assert not any(client._supervisor.is_alive() for client in (agents.prefill, agents.decode))


def test_vanished_keys_are_written_again(agents: Agents, metadata_url: str) -> None:
    store = open_store(metadata_url)
    name = f"mooncake/ram/{agents.prefill.settings.ports.segment_name}"
    wait_until(lambda: store.get(name) is not None)
    value = store.get(name)
    time.sleep(0)

    wait_until(lambda: store.get(INSTANCE_PREFIX + agents.prefill.settings.ports.segment_name) is not None)
    store.delete(name)

    wait_until(lambda: store.get(name) == value)


def test_metadata_server_that_is_not_there_is_named_and_waited_for(make_agents: MakeAgents) -> None:
    from mooncake_v0.metadata.gateway import start_gateway_thread

    port = find_free_port()
    agents = make_agents(metadata_url=f"http://127.0.0.1:{port}/metadata")
    wait_until(lambda: f"127.0.0.1:{port}" in getattr(agents.status("decode"), "engine", ""))

    gateway = start_gateway_thread("memory:", port=port, is_private=False)
    try:
        agents.wait_connected()
        assert agents.store(1, MIB, fill=1) == ""
        assert agents.fetch(1) == bytes([1]) * MIB
    finally:
        agents.prefill.close()
        agents.decode.close()
        gateway.close()


def test_second_process_of_the_same_name_is_refused_and_the_first_goes_on(
    agents: Agents, make_agents: MakeAgents
) -> None:
    twin = make_agents(prefill={"config": agents.prefill.settings.config})

    wait_until(lambda: "is taken" in getattr(twin.status("prefill"), "peer", ""))

    assert agents.store(1, MIB, fill=1) == ""
    assert agents.fetch(1) == bytes([1]) * MIB


def test_stock_engine_keeps_its_name_while_it_answers(make_agents: MakeAgents, metadata_url: str) -> None:
    base = find_free_range(150)
    config = MooncakeConfig(Endpoint("127.0.0.1", base), Endpoint("127.0.0.1", base + 100), metadata_url, "tcp")
    name = f"127.0.0.1:{base}"
    store, stock = open_store(metadata_url), Engine(is_at_its_name=False)  # so that the ports of its name are free
    assert stock.ask("initialize", name=name, metadata=metadata_url) == 0
    keys = {kind: store.get(f"mooncake/{kind}/{name}") for kind in ("ram", "rpc_meta")}
    assert json.loads(keys["rpc_meta"] or b"{}")["rpc_port"] != base

    agents = make_agents(config=config)
    wait_until(lambda: "an engine of other software" in getattr(agents.status("prefill"), "engine", ""))
    after = {kind: store.get(f"mooncake/{kind}/{name}") for kind in ("ram", "rpc_meta")}
    stock.kill()
    agents.wait_connected()
    store.close()

    assert after == keys


def test_shared_secret_is_needed_on_both_sides(make_agents: MakeAgents, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("correct horse\n")
    second.write_text("battery staple\n")
    agents = make_agents(prefill={"secret_file": str(first)}, decode={"secret_file": str(second)})
    wait_until(lambda: getattr(agents.status("decode"), "engine", "") == "ready")
    ports = agents.prefill.settings.ports

    with pytest.raises(AgentUnavailableError):
        query_status(ports.host, ports.side_channel, timeout_s=1.0)
    with pytest.raises(AgentUnavailableError):
        query_status(ports.host, ports.side_channel, timeout_s=1.0, secret=b"battery staple")
    assert query_status(ports.host, ports.side_channel, secret=b"correct horse").role == "prefill"
    assert not agents.is_connected()


def test_agents_with_the_same_secret_connect(make_agents: MakeAgents, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("correct horse\n")
    agents = make_agents(secret_file=str(secret))
    agents.wait_connected()

    assert agents.store(1, MIB, fill=1) == ""
    assert agents.fetch(1) == bytes([1]) * MIB


def test_only_the_engine_listens_beyond_the_configured_address(shared_agents: Agents) -> None:
    """The engine's two ports are on all addresses, which cannot be changed (0.3.3.post2, tcp_transport.cpp:187)."""
    ports = shared_agents.prefill.settings.ports

    addresses = listening_addresses(agent_pid(shared_agents.prefill))

    assert ("127.0.0.1", ports.side_channel) in addresses
    assert {port for host, port in addresses if host != "127.0.0.1"} <= {ports.handshake, ports.data}


def test_worker_hears_of_its_agents_state_and_end(make_agents: MakeAgents) -> None:
    made = make_agents()
    heard: list[Status | None] = []
    made.decode.on_report = heard.append
    made.wait_connected()

    wait_until(lambda: any(one and one.peer_epoch for one in heard), "a report says that the peer is there")
    os.kill(agent_pid(made.decode), signal.SIGKILL)

    wait_until(lambda: None in heard, "its end is told")
    ended = heard.index(None)
    wait_until(lambda: any(one and one.peer_epoch for one in heard[ended:]), "the next one reports too")
