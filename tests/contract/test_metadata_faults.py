"""Stores that fail under a gateway in the ways they fail in the field: slow, full, damaged, gone for a while."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator

import pytest
import redis

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.metadata.store import MetadataStore, open_store
from tests import servers
from tests.engine_child import Engine, free_name

ENGINE_TIMEOUT_S = 3.0
CORRUPT = (
    b"garbage",
    b"[]",
    b"\xff",
    b"null",
    b"3",
    b'"x"',
    b"{}",
    b'{"name":"x"}',
    b'{"protocol":"tcp","buffers":5,"name":"x","ip_or_host_name":[],"rpc_port":"q"}',
    b'{"protocol":[],"buffers":[3],"name":{}}',
)


def put_acknowledged(store: MetadataStore, key: str, value: bytes) -> bool:
    try:
        store.put(key, value)
    except MetadataError:
        return False
    return True


def test_a_store_that_stalls_for_two_seconds_loses_no_acknowledged_write(tmp_path: Path) -> None:
    server = servers.start_redis(tmp_path)
    gateway = start_gateway_thread(server.url, stale_reads=False)
    store = open_store(gateway.url, timeout_s=ENGINE_TIMEOUT_S)
    took_s: list[float] = []

    def put(number: int) -> tuple[str, bool]:
        started = time.monotonic()
        is_acknowledged = put_acknowledged(store, f"mooncake/{number}", b"%d" % number)
        took_s.append(time.monotonic() - started)
        return f"mooncake/{number}", is_acknowledged

    with redis.Redis(port=server.port) as control, ThreadPoolExecutor(16) as threads:
        before = put(0)
        control.client_pause(2000)
        during = list(threads.map(put, range(1, 100)))
        servers.wait_until(lambda: put(100)[1], "recovery", 10)
        kept = {entry.key for entry in store.list("mooncake/")}

    for thing in (store, gateway):
        thing.close()
    server.stop()

    assert before[1] is True
    assert {key for key, is_acknowledged in during if is_acknowledged} <= kept
    assert max(took_s) < ENGINE_TIMEOUT_S


def test_a_store_killed_and_restarted_under_load_keeps_every_acknowledged_write(tmp_path: Path) -> None:
    server = servers.start_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    gateway = start_gateway_thread(server.url, stale_reads=False)
    store = open_store(gateway.url)
    acknowledged: list[str] = []
    stop = threading.Event()

    def write(number: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            if put_acknowledged(store, f"mooncake/{number}/{i}", b"1"):
                acknowledged.append(f"mooncake/{number}/{i}")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    servers.wait_until(lambda: len(acknowledged) > 50, "some writes")
    server.kill()
    server.start()
    before = len(acknowledged)
    servers.wait_until(lambda: len(acknowledged) > before + 50, "writes after the restart")
    stop.set()
    for thread in threads:
        thread.join(10)
    kept = {entry.key for entry in store.list("mooncake/")}
    for thing in (store, gateway):
        thing.close()
    server.stop()

    assert set(acknowledged) <= kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """`metadata serve` over sqlite on a disk of 512 KiB with a ballast file; the URL, and the ballast's path from here."""
    disk = tmp_path / "disk"
    disk.mkdir()
    serve = f"{sys.executable} -m mooncake_v0 metadata serve --port 0 --store sqlite:///{disk}/keys.db"
    script = f"mount -t tmpfs -o size=512k none {disk} && head -c 100000 /dev/zero > {disk}/ballast && exec {serve}"
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert url, "`unshare --user --mount` or the mount of a tmpfs is not allowed on this machine"
    yield url, Path(f"/proc/{process.pid}/root{disk}/ballast")
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


def test_a_full_disk_is_said_and_survived(small_disk: tuple[str, Path]) -> None:
    url, ballast = small_disk
    store = open_store(url)
    value = os.urandom(40_000)

    acknowledged = [i for i in range(20) if put_acknowledged(store, f"mooncake/{i}", value)]
    with pytest.raises(MetadataError, match="could not be written"):
        store.put("mooncake/one-more", value)
    read_back = [store.get(f"mooncake/{i}") == value for i in acknowledged]
    ballast.unlink()
    servers.wait_until(lambda: put_acknowledged(store, "mooncake/small", b"1"), "a write after room was made", 10)
    still = [store.get(f"mooncake/{i}") == value for i in acknowledged]
    store.close()

    assert 0 < len(acknowledged) < 20
    assert all(read_back) and all(still)


def test_a_damaged_sqlite_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "keys.db").write_bytes(b"this is not a database" * 1000)
    store = open_store(f"sqlite:///{tmp_path}/keys.db")

    with pytest.raises(MetadataError, match="not a database"):
        store.get("a")
    store.close()


@pytest.mark.pin
@pytest.mark.parametrize("value", CORRUPT)
def test_an_engine_survives_a_corrupt_value_under_its_peers_key(value: bytes) -> None:
    gateway = start_gateway_thread("memory:")
    store = open_store(gateway.url)
    engine = Engine()
    assert engine.ask("initialize", name=free_name(), metadata=gateway.url) == 0
    store.put("mooncake/ram/127.0.0.1:20998", value)
    store.put("mooncake/rpc_meta/127.0.0.1:20998", value)

    answer = engine.ask("read", name="127.0.0.1:20998", address=4096, size=16)

    assert answer[0] == -1
    assert engine.leave() == 0
    store.close()
    gateway.close()


def test_hundreds_of_connections_do_not_keep_others_from_being_served(tmp_path: Path) -> None:
    gateway = start_gateway_thread(f"sqlite:///{tmp_path}/keys.db")
    port = int(gateway.masked_url.split(":")[2].split("/")[0])
    held = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(400)]
    store = open_store(gateway.url)

    store.put("mooncake/a", b"1")

    assert store.get("mooncake/a") == b"1"
    for connection in held:
        connection.close()
    store.close()
    gateway.close()
