"""One suite over every metadata store, against real servers."""

from __future__ import annotations

import threading
import time
import urllib.parse
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Callable, Iterator

import pytest
import redis

from mooncake_v0.errors import MetadataError, StoreUnavailableError, UnsupportedError
from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.metadata.store import DELETE, PUT, Change, Entry, MetadataStore, open_store
from tests import servers

SECRETS = (servers.PASSWORD, servers.SENTINEL_PASSWORD)
FULL = (
    "memory",
    "sqlite",
    "redis",
    "redis-acl-tls",
    "redis-sentinel",
    "redis-cluster",
    "etcd",
    "etcd-three-members",
    "etcd-auth-tls",
    "gateway",
    "gateway-over-sqlite",
)
ODD_KEYS = ("a b", "a//b", "100%", "%2F", "é/日本", "line\r\nbreak", "?a=b&c#d", "a+b", 'quo"te', "[*?]\\", "\x00nul")


class Stores:
    """URLs by name; each server is started when it is first asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._urls: dict[str, str] = {}

    def url(self, name: str) -> str:
        if name not in self._urls:
            self._urls[name] = self._start(name)
        return self._urls[name]

    def folder(self, name: str) -> Path:
        path = self._folder / f"{name}-{uuid.uuid4().hex[:6]}"
        path.mkdir()
        return path

    def keep(self, started: list[servers.Server]) -> list[servers.Server]:
        for server in started:
            self._stack.callback(server.stop)
        return started

    def _start(self, name: str) -> str:
        folder = self.folder(name)
        if name == "gateway" or name == "gateway-over-sqlite":
            gateway = start_gateway_thread("memory:" if name == "gateway" else f"sqlite:///{folder}/keys.db")
            self._stack.callback(gateway.close)
            return gateway.url
        ways: dict[str, Callable[[], list[servers.Server]]] = {
            "redis": lambda: [servers.start_redis(folder)],
            "redis-acl-tls": lambda: [servers.start_redis_acl_tls(folder, servers.make_certificates(folder))],
            "redis-sentinel": lambda: servers.start_redis_sentinel(folder),
            "redis-cluster": lambda: servers.start_redis_cluster(folder),
            "etcd": lambda: [servers.start_etcd(folder)],
            "etcd-three-members": lambda: servers.start_etcd_cluster(folder, 3),
            "etcd-auth-tls": lambda: [servers.start_etcd_auth_tls(folder, servers.make_certificates(folder))],
            "wheel-server": lambda: [servers.start_wheel_server(folder)],
            "sqlite": lambda: [],
            "memory": lambda: [],
        }
        started = self.keep(ways[name]())
        return started[-1].url if started else {"memory": "memory:", "sqlite": f"sqlite:///{folder}/keys.db"}[name]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    with ExitStack() as stack:
        yield Stores(tmp_path_factory.mktemp("stores"), stack)


@pytest.fixture(params=FULL)
def store(request: pytest.FixtureRequest, stores: Stores) -> Iterator[MetadataStore]:
    opened = open_store(stores.url(request.param))
    yield opened
    opened.close()


@pytest.fixture
def prefix() -> str:
    return f"mooncake/{uuid.uuid4().hex}/"


def test_get_returns_what_put_wrote(store: MetadataStore, prefix: str) -> None:
    store.put(prefix + "a", b'{"name": "a"}\n')

    assert store.get(prefix + "a") == b'{"name": "a"}\n'


@pytest.mark.parametrize("value", [b"", b"\x00\xff\xfe", b"x" * 1024 * 1024], ids=["empty", "binary", "one MiB"])
def test_values_come_back_byte_for_byte(store: MetadataStore, prefix: str, value: bytes) -> None:
    store.put(prefix + "a", value)

    assert store.get(prefix + "a") == value
    assert store.list(prefix) == [Entry(prefix + "a", value)]


def test_put_overwrites_without_asking(store: MetadataStore, prefix: str) -> None:
    store.put(prefix + "a", b"old")
    store.put(prefix + "a", b"new")

    assert store.get(prefix + "a") == b"new"


def test_a_key_that_does_not_exist_is_none_and_deleting_it_says_false(store: MetadataStore, prefix: str) -> None:
    assert store.get(prefix + "a") is None
    assert store.delete(prefix + "a") is False


def test_delete_removes_a_key_once(store: MetadataStore, prefix: str) -> None:
    store.put(prefix + "a", b"1")

    assert [store.delete(prefix + "a"), store.delete(prefix + "a")] == [True, False]
    assert store.get(prefix + "a") is None


def test_delete_with_an_expected_value_spares_a_value_that_changed(store: MetadataStore, prefix: str) -> None:
    store.put(prefix + "a", b"new")

    assert store.delete(prefix + "a", expected=b"old") is False
    assert store.get(prefix + "a") == b"new"
    assert store.delete(prefix + "a", expected=b"new") is True
    assert store.get(prefix + "a") is None


@pytest.mark.parametrize("odd", ODD_KEYS, ids=repr)
def test_odd_keys_are_kept_as_they_are(store: MetadataStore, prefix: str, odd: str) -> None:
    store.put(prefix + odd, b"1")

    assert store.get(prefix + odd) == b"1"
    assert store.list(prefix + odd) == [Entry(prefix + odd, b"1")]
    assert store.delete(prefix + odd) is True


def test_list_gives_the_keys_of_one_prefix_sorted(store: MetadataStore, prefix: str) -> None:
    for name in ("b", "a", "é", "a/c"):
        store.put(prefix + name, name.encode())
    store.put(prefix[:-1] + "-other", b"1")

    assert [entry.key for entry in store.list(prefix)] == [prefix + name for name in ("a", "a/c", "b", "é")]
    assert store.list(prefix + "[ab]*") == []


def test_a_key_with_a_ttl_vanishes_unless_it_is_put_again(store: MetadataStore, prefix: str) -> None:
    store.put(prefix + "gone", b"1", ttl_s=1)
    store.put(prefix + "kept", b"1", ttl_s=1)
    store.put(prefix + "kept", b"1")

    servers.wait_until(lambda: store.get(prefix + "gone") is None, "the expiry", 10)
    assert store.list(prefix) == [Entry(prefix + "kept", b"1")]


def test_a_watch_tells_of_its_own_prefix_only(store: MetadataStore, prefix: str) -> None:
    watch = store.watch(prefix)

    store.put(prefix[:-1] + "-other", b"1")
    store.put(prefix + "a", b"1")
    first = watch.next(5)
    store.delete(prefix + "a")
    second = watch.next(5)
    nothing = watch.next(0.1)
    watch.close()

    assert (first, second) == (Change(PUT, prefix + "a", b"1"), Change(DELETE, prefix + "a", None))
    assert nothing is None


def test_no_acknowledged_put_is_lost_among_eight_threads(store: MetadataStore, prefix: str) -> None:
    def write(number: int) -> None:
        for i in range(20):
            store.put(f"{prefix}{number}/{i}", b"%d" % i)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(store.list(prefix)) == 160


def test_close_may_be_called_twice(store: MetadataStore, prefix: str) -> None:
    store.put(prefix + "a", b"1")

    store.close()
    store.close()


@pytest.mark.parametrize("name", ["etcd", "redis"])
def test_a_list_longer_than_one_page_is_complete(stores: Stores, prefix: str, name: str) -> None:
    store = open_store(stores.url(name))
    for i in range(2100):
        store.put(f"{prefix}{i:05}", b"1")

    assert [entry.key for entry in store.list(prefix)] == [f"{prefix}{i:05}" for i in range(2100)]
    store.close()


def test_the_wheels_own_server_can_get_put_and_delete(stores: Stores, prefix: str) -> None:
    store = open_store(stores.url("wheel-server"))

    store.put(prefix + "a b/%", b"1")
    assert store.get(prefix + "a b/%") == b"1"
    assert store.delete(prefix + "a b/%", expected=b"2") is False
    assert store.delete(prefix + "a b/%", expected=b"1") is True
    assert store.get(prefix + "a b/%") is None
    store.close()


@pytest.mark.parametrize("use", [lambda s: s.list(""), lambda s: s.watch("")], ids=["list", "watch"])
def test_the_wheels_own_server_is_said_to_have_no_list_and_no_watch(
    stores: Stores, use: Callable[[MetadataStore], object]
) -> None:
    store = open_store(stores.url("wheel-server"))

    with pytest.raises(UnsupportedError, match="metadata serve"):
        use(store)
    store.close()


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:1", "redis+sentinel://127.0.0.1:1/meta", "redis+cluster://127.0.0.1:1", "etcd://127.0.0.1:1"]
    + ["http://127.0.0.1:1/metadata", "etcd://127.0.0.1:1,127.0.0.1:2"],
)
def test_a_store_that_is_not_there_is_unavailable_within_its_deadline(url: str) -> None:
    store = open_store(url, timeout_s=0.5)
    started = time.monotonic()

    with pytest.raises(StoreUnavailableError, match="127.0.0.1:1"):
        store.get("mooncake/a")
    assert time.monotonic() - started < 2.5
    store.close()


@pytest.mark.parametrize("name", ["redis-acl-tls", "etcd-auth-tls"])
def test_a_wrong_password_is_refused_and_not_repeated(stores: Stores, name: str) -> None:
    store = open_store(stores.url(name).replace(servers.PASSWORD_IN_URL, "wrong-guess"))

    with pytest.raises(MetadataError) as caught:
        store.get("mooncake/a")
    assert "wrong-guess" not in str(caught.value)
    assert not isinstance(caught.value, StoreUnavailableError)
    store.close()


@pytest.mark.parametrize("start", [servers.start_redis, servers.start_etcd, servers.start_wheel_server])
def test_a_stopped_server_costs_one_deadline_and_is_used_again_when_it_goes_on(
    stores: Stores, prefix: str, start: Callable[[Path], servers.Server]
) -> None:
    server = stores.keep([start(stores.folder("stopped"))])[0]
    store = open_store(server.url, timeout_s=0.8)
    store.put(prefix + "a", b"1")

    server.pause()
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        store.get(prefix + "a")
    took_s = time.monotonic() - started
    server.resume()

    assert took_s < 2.5
    servers.wait_until(lambda: _value_or_none(store, prefix + "a") == b"1", "recovery", 10)
    store.close()


@pytest.mark.parametrize("name", ["redis-acl-tls", "etcd-auth-tls"])
def test_a_server_far_away_is_reached_over_tls(stores: Stores, prefix: str, name: str) -> None:
    address = urllib.parse.urlsplit(stores.url(name))
    assert address.port is not None

    with servers.far_away(address.port, delay_s=0.15) as port:  # as by satellite
        store = open_store(stores.url(name).replace(f":{address.port}", f":{port}"))
        store.put(prefix + "a", b"1")

        assert store.get(prefix + "a") == b"1"
        store.close()


def _value_or_none(store: MetadataStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except StoreUnavailableError:
        return None


@pytest.mark.parametrize("start", [servers.start_redis, servers.start_etcd, servers.start_wheel_server])
def test_a_server_killed_and_started_again_is_used_by_the_same_store_object(
    stores: Stores, prefix: str, start: Callable[[Path], servers.Server]
) -> None:
    server = stores.keep([start(stores.folder("killed"))])[0]
    store = open_store(server.url)
    store.put(prefix + "a", b"1")

    server.kill()
    server.start()

    store.put(prefix + "b", b"2")  # the first call after the restart succeeds
    assert store.get(prefix + "b") == b"2"
    store.close()


def test_an_etcd_cluster_that_loses_its_leader_or_any_member_goes_on(stores: Stores, prefix: str) -> None:
    members = stores.keep(servers.start_etcd_cluster(stores.folder("failover"), 3))
    store = open_store(members[0].url)
    store.put(prefix + "before", b"1")

    members[0].kill()  # the member that this store used until now
    store.put(prefix + "after", b"2")

    assert [entry.key for entry in store.list(prefix)] == [prefix + "after", prefix + "before"]
    store.close()


def test_a_store_behind_sentinel_follows_the_failover(stores: Stores, prefix: str) -> None:
    started = stores.keep(servers.start_redis_sentinel(stores.folder("sentinel-failover"), replicas=1))
    master, replica, sentinel = started
    store = open_store(sentinel.url)
    store.put(prefix + "a", b"1")
    with redis.Redis(port=sentinel.port) as control, redis.Redis(port=replica.port) as copy:
        servers.wait_until(lambda: copy.get(prefix + "a") == b"1", "the replica's copy")
        servers.wait_until(lambda: len(control.sentinel_slaves("meta")) == 1, "sentinel's knowledge of the replica")

    master.kill()

    servers.wait_until(lambda: _value_or_none(store, prefix + "a") == b"1", "the failover", 30)
    store.put(prefix + "b", b"2")
    assert store.get(prefix + "b") == b"2"
    store.close()


def test_sentinels_with_a_login_of_their_own_are_asked_with_it(stores: Stores, prefix: str) -> None:
    sentinel = stores.keep(servers.start_redis_sentinel_logins(stores.folder("sentinel-logins")))[-1]
    store = open_store(sentinel.url)
    without, wrong = sentinel.url.partition("?")[0], sentinel.url.replace("user=watcher", "user=nobody")

    store.put(prefix + "a", b"1")

    assert store.get(prefix + "a") == b"1"
    store.close()
    for url in (without, wrong):
        store = open_store(url)
        with pytest.raises(MetadataError, match=r"the sentinels .* refused the login") as caught:
            store.get(prefix + "a")
        assert not any(secret in f"{caught.value} {store.url}" for secret in SECRETS)
        store.close()


def test_a_service_that_no_sentinel_knows_is_said_without_a_secret(stores: Stores, prefix: str) -> None:
    sentinel = stores.keep(servers.start_redis_sentinel_logins(stores.folder("sentinel-unknown")))[-1]
    unknown, dead = sentinel.url.replace("/meta/", "/nothing/"), sentinel.url.replace(f":{sentinel.port}/", ":1/")
    for url in (unknown, dead):
        store = open_store(url)
        with pytest.raises(StoreUnavailableError, match="no sentinel knows a master") as caught:
            store.get(prefix + "a")
        assert not any(secret in f"{caught.value} {store.url}" for secret in SECRETS)
        store.close()


def test_etcd_with_a_login_survives_the_loss_of_its_token(stores: Stores, prefix: str) -> None:
    folder = stores.folder("token")
    server = stores.keep([servers.start_etcd_auth_tls(folder, servers.make_certificates(folder))])[0]
    store = open_store(server.url)
    store.put(prefix + "a", b"1")

    server.kill()  # simple tokens live in the member's memory
    server.start()

    assert store.get(prefix + "a") == b"1"
    store.close()


def test_a_redis_login_without_a_command_names_the_acl(stores: Stores, prefix: str) -> None:
    store = open_store(stores.url("redis-acl-tls"))

    with pytest.raises(MetadataError, match="ACL"):
        store.get("foreign/key")
    store.close()
