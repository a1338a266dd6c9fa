"""The pinned engine itself as the client of the gateway, over every kind of store."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Callable, Iterator

import pytest

from mooncake_v0.metadata.gateway import GatewayThread, start_gateway_thread
from mooncake_v0.metadata.liveness import ALIVE, STALE, Judge, judge_segments
from mooncake_v0.metadata.prune import find_candidates, read_segments, remove
from mooncake_v0.metadata.store import Entry, MetadataStore, open_store
from tests import servers
from tests.engine_child import Engine, free_name

pytestmark = pytest.mark.pin

STORES = ("memory", "sqlite", "redis-acl-tls", "etcd-auth-tls", "etcd-three-members")
LOCAL = Judge(is_local=True)


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=STORES, scope="module")
def gateway(
    request: pytest.FixtureRequest, stack: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> GatewayThread:
    folder = tmp_path_factory.mktemp(request.param)
    start: dict[str, Callable[[], str]] = {
        "memory": lambda: "memory:",
        "sqlite": lambda: f"sqlite:///{folder}/keys.db",
        "redis-acl-tls": lambda: kept(stack, servers.start_redis_acl_tls(folder, servers.make_certificates(folder))),
        "etcd-auth-tls": lambda: kept(stack, servers.start_etcd_auth_tls(folder, servers.make_certificates(folder))),
    }
    start["etcd-three-members"] = lambda: [kept(stack, m) for m in servers.start_etcd_cluster(folder, 3)][0]
    handle = start_gateway_thread(start[request.param]())
    stack.callback(handle.close)
    return handle


def kept(stack: ExitStack, server: servers.Server) -> str:
    stack.callback(server.stop)
    return server.url


@pytest.fixture
def store(gateway: GatewayThread) -> Iterator[MetadataStore]:
    opened = open_store(gateway.url)
    yield opened
    opened.close()


@pytest.fixture
def engines() -> Iterator[Callable[[], Engine]]:
    started: list[Engine] = []

    def start() -> Engine:
        started.append(Engine())
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


def engine_entries(store: MetadataStore, name: str) -> list[Entry]:
    """What is published under a name."""
    return [entry for kind in ("ram", "rpc_meta") for entry in store.list(f"mooncake/{kind}/{name}")]


def test_an_engine_publishes_its_two_keys_and_removes_them_when_it_ends(
    gateway: GatewayThread, store: MetadataStore, engines: Callable[[], Engine]
) -> None:
    engine, name = engines(), free_name()

    assert engine.ask("initialize", name=name, metadata=gateway.url) == 0
    code, address = engine.ask("register", size=8192, fill=7)
    ram = json.loads(store.get(f"mooncake/ram/{name}") or b"{}")
    rpc_meta = json.loads(store.get(f"mooncake/rpc_meta/{name}") or b"{}")
    exit_code = engine.leave()

    assert code == 0
    assert (ram["protocol"], address in [b["addr"] for b in ram["buffers"]]) == ("tcp", True)
    assert f"{rpc_meta['ip_or_host_name']}:{rpc_meta['rpc_port']}" == name
    assert exit_code == 0
    assert engine_entries(store, name) == []


def test_two_engines_find_each_other_through_the_gateway_and_read(
    gateway: GatewayThread, engines: Callable[[], Engine]
) -> None:
    producer, consumer, name = engines(), engines(), free_name()
    assert producer.ask("initialize", name=name, metadata=gateway.url) == 0
    assert consumer.ask("initialize", name=free_name(), metadata=gateway.url) == 0
    _, address = producer.ask("register", size=4096, fill=0xA5)

    assert consumer.ask("read", name=name, address=address, size=4096) == [0, "a5" * 4096]
    assert consumer.ask("read", name="127.0.0.1:20999", address=address, size=16)[0] == -1


def test_an_engine_killed_and_started_again_under_its_name_is_read_by_its_old_peer(
    gateway: GatewayThread, store: MetadataStore, engines: Callable[[], Engine]
) -> None:
    producer, consumer, name = engines(), engines(), free_name()
    assert producer.ask("initialize", name=name, metadata=gateway.url) == 0
    assert consumer.ask("initialize", name=free_name(), metadata=gateway.url) == 0
    _, address = producer.ask("register", size=64, fill=1)
    assert consumer.ask("read", name=name, address=address, size=64)[0] == 0

    producer.kill()
    stale = judge_segments(read_segments(store), LOCAL)[name].status
    successor = engines()
    restarted = successor.ask("initialize", name=name, metadata=gateway.url)
    _, address = successor.ask("register", size=64, fill=2)

    assert stale == STALE
    assert restarted == 0  # the dead process's keys are overwritten, not refused
    assert consumer.ask("read", name=name, address=address, size=64) == [0, "02" * 64]


def test_prune_removes_exactly_three_killed_engines_while_a_living_pair_reads(
    gateway: GatewayThread, store: MetadataStore, engines: Callable[[], Engine]
) -> None:
    producer, consumer, name = engines(), engines(), free_name()
    assert producer.ask("initialize", name=name, metadata=gateway.url) == 0
    assert consumer.ask("initialize", name=free_name(), metadata=gateway.url) == 0
    _, address = producer.ask("register", size=64, fill=3)
    dead_names = [free_name(), free_name(), free_name()]
    for dead_name in dead_names:
        victim = engines()
        assert victim.ask("initialize", name=dead_name, metadata=gateway.url) == 0
        victim.kill()
    store.put("mooncake-other/key", b"foreign")

    candidates = [c for c in find_candidates(store, LOCAL, pause_s=0.1) if c.segment.name in dead_names]
    during = consumer.ask("read", name=name, address=address, size=64)
    removed = [key for candidate in candidates for key in remove(store, candidate)]

    assert sorted(removed) == sorted(f"mooncake/{kind}/{n}" for n in dead_names for kind in ("ram", "rpc_meta"))
    assert store.get("mooncake-other/key") == b"foreign"
    assert during == [0, "03" * 64]
    assert consumer.ask("read", name=name, address=address, size=64) == [0, "03" * 64]
    assert judge_segments(read_segments(store), LOCAL)[name].status == ALIVE


def test_an_engine_without_the_private_login_cannot_start(
    gateway: GatewayThread, store: MetadataStore, engines: Callable[[], Engine]
) -> None:
    engine, name = engines(), free_name()

    assert engine.ask("initialize", name=name, metadata=gateway.masked_url) == -1
    assert engine_entries(store, name) == []


def test_a_pair_reads_on_while_redis_is_killed_and_started_again(tmp_path: Path, engines: Callable[[], Engine]) -> None:
    redis = servers.start_redis(tmp_path)
    gateway = start_gateway_thread(redis.url)
    producer, consumer, name = engines(), engines(), free_name()
    assert producer.ask("initialize", name=name, metadata=gateway.url) == 0
    assert consumer.ask("initialize", name=free_name(), metadata=gateway.url) == 0
    _, address = producer.ask("register", size=64, fill=5)
    newcomer = engines()
    assert newcomer.ask("initialize", name=free_name(), metadata=gateway.url) == 0

    redis.kill()
    known_peer = consumer.ask("read", name=name, address=address, size=64)[0]
    new_peer = newcomer.ask("read", name=name, address=address, size=64)[0]  # answered from the gateway's memory
    redis.start()
    store = open_store(gateway.url)
    servers.wait_until(lambda: _registers(producer), "a register after redis came back", 10)
    in_redis = engine_entries(store, name)
    store.close()
    gateway.close()
    redis.stop()

    assert (known_peer, new_peer) == (0, 0)
    assert [entry.key for entry in in_redis] == [
        f"mooncake/ram/{name}"
    ]  # the engine itself never writes rpc_meta again


def test_a_pair_starts_and_reads_when_one_of_three_etcd_members_is_killed_in_between(
    tmp_path: Path, engines: Callable[[], Engine]
) -> None:
    members = servers.start_etcd_cluster(tmp_path, 3)
    gateway = start_gateway_thread(members[0].url, stale_reads=False)
    producer, consumer, name = engines(), engines(), free_name()
    assert producer.ask("initialize", name=name, metadata=gateway.url) == 0

    members[0].kill()
    started = consumer.ask("initialize", name=free_name(), metadata=gateway.url)
    code, address = producer.ask("register", size=64, fill=8)
    answer = consumer.ask("read", name=name, address=address, size=64)
    gateway.close()
    for member in members:
        member.stop()

    assert (started, code, answer) == (0, 0, [0, "08" * 64])


def _registers(engine: Engine) -> bool:
    code = engine.ask("register", size=64, fill=6)[0]
    if code != 0:
        engine.ask("unregister")
    return bool(code == 0)
