"""Pairs that register themselves in a real metadata store, and stores that fail."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import AsyncIterator, Iterator

import aiohttp
import pytest

from mooncake_v0.metadata.registry import InstanceRecord, register, unregister
from mooncake_v0.metadata.store import MetadataStore, open_store
from mooncake_v0.proxy.pair_source import StoreSource, pairs_of
from mooncake_v0.proxy.settings import PairSpec
from tests.proxy.backend import Backend
from tests.proxy.command import running_command
from tests.proxy.conftest import eventually
from tests.servers import Server, start_etcd, start_redis

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
START = {"redis": start_redis, "etcd": start_etcd}


def record(
    role: str, api_url: str | None, *, deployment: str = "d1", rank: int = 0, port: int = 20000
) -> InstanceRecord:
    now = time.time()
    return InstanceRecord(
        segment=f"127.0.0.1:{port}",
        role=role,
        rank=rank,
        host="127.0.0.1",
        handshake_port=port,
        data_port=port + 1,
        side_channel_port=port + 32,
        protocol="tcp",
        pid=1,
        hostname="h",
        epoch=f"e{port}",
        started_at=now,
        refreshed_at=now,
        deployment=deployment,
        api_url=api_url,
    )


@pytest.fixture(params=sorted(START))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    started = START[request.param](tmp_path)
    yield started
    started.stop()


@pytest.fixture
def store(server: Server) -> Iterator[MetadataStore]:
    opened = open_store(server.url)
    yield opened
    opened.close()


@pytest.fixture
async def backends() -> AsyncIterator[list[Backend]]:
    started = [await Backend().start() for _ in range(4)]
    yield started
    for one in started:
        await one.stop()


async def status_of(url: str, path: str = "/v1/completions") -> int:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=BODY) as response:
        return response.status


async def pair_names(admin_url: str) -> list[str]:
    async with aiohttp.ClientSession() as session, session.get(admin_url + "/pairs") as response:
        return [pair["name"] for pair in (await response.json())["pairs"] if pair["decode"]["state"] == "up"]


async def until_pairs(admin_url: str, names: list[str]) -> None:
    deadline = time.monotonic() + 15
    while await pair_names(admin_url) != names:
        assert time.monotonic() < deadline, await pair_names(admin_url)
        await asyncio.sleep(0.05)


async def test_registered_instances_are_found_followed_and_dropped(
    server: Server, store: MetadataStore, backends: list[Backend]
) -> None:
    prefill, decode, second_prefill, second_decode = backends
    first = [register(store, record("prefill", prefill.url)), register(store, record("decode", decode.url, port=20100))]
    arguments = ["--discover", server.url, "--port", "0", "--admin-port", "0", "--access-log", "none"]
    async with running_command(*arguments, "--drain-delay", "0") as command:
        await until_pairs(command.admin_url, ["d1"])
        served = await status_of(command.url)

        register(store, record("prefill", second_prefill.url, deployment="d2", port=20200))
        register(store, record("decode", second_decode.url, deployment="d2", port=20300))
        await until_pairs(command.admin_url, ["d1", "d2"])

        for one in first:
            unregister(store, one)
        await decode.stop()
        await until_pairs(command.admin_url, ["d2"])
        await eventually(lambda: "pair d1 is gone" in command.stderr)
        served_by_second = await status_of(command.url)

    assert served == served_by_second == 200
    assert len(decode.posts()) == 1
    assert len(second_decode.posts()) == 1


@pytest.mark.parametrize("server", ["redis"], indirect=True)
async def test_store_that_dies_or_forgets_takes_no_pair_with_it(
    server: Server, store: MetadataStore, backends: list[Backend]
) -> None:
    prefill, decode, *_ = backends
    records = [record("prefill", prefill.url), record("decode", decode.url, port=20100)]
    first = [register(store, one) for one in records]
    arguments = ["--discover", server.url, "--port", "0", "--admin-port", "0", "--access-log", "none"]
    async with running_command(*arguments, "--drain-delay", "0") as command:
        await until_pairs(command.admin_url, ["d1"])

        for one in first:
            unregister(store, one)
        await asyncio.sleep(2.5)
        forgotten = await status_of(command.url)
        server.kill()
        await eventually(lambda: "pairs stay as they are" in command.stderr, 20)
        dead = await status_of(command.url)

    assert forgotten == dead == 200


async def test_two_proxies_over_one_store_serve_the_same_pairs(
    server: Server, store: MetadataStore, backends: list[Backend]
) -> None:
    register(store, record("prefill", backends[0].url))
    register(store, record("decode", backends[1].url, port=20100))
    arguments = ["--discover", server.url, "--port", "0", "--admin-port", "0", "--access-log", "none"]
    async with running_command(*arguments) as one, running_command(*arguments) as two:
        await until_pairs(one.admin_url, ["d1"])
        await until_pairs(two.admin_url, ["d1"])
        statuses = [await status_of(one.url), await status_of(two.url)]

    assert statuses == [200, 200]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([record("prefill", "http://p:1")], ()),
        ([record("prefill", "http://p:1"), record("decode", None)], ()),
        ([record("prefill", "http://p:1"), record("decode", "http://d:1", rank=1)], ()),
        ([record("prefill", "http://p:1"), record("decode", "http://d:1", deployment="other")], ()),
        ([record("prefill", "ftp://p:1"), record("decode", "http://d:1")], ()),
        (
            [record("prefill", "http://p:1"), record("decode", "http://d:1/")],
            (PairSpec("d1", "http://p:1", "http://d:1"),),
        ),
    ],
    ids=["no decode", "no address", "not rank 0", "another configuration", "not http", "a pair"],
)
def test_instances_of_one_configuration_are_a_pair(
    records: list[InstanceRecord], expected: tuple[PairSpec, ...]
) -> None:
    assert pairs_of(records, now=records[0].refreshed_at) == expected


def test_instance_that_has_not_refreshed_is_left_out() -> None:
    records = [record("prefill", "http://p:1"), record("decode", "http://d:1")]

    assert pairs_of(records, now=time.time() + 3600) == ()


def test_store_is_opened_again_after_a_failure(tmp_path: Path) -> None:
    source = StoreSource(lambda: open_store(f"sqlite:///{tmp_path}/meta.db"))

    before = source.read()
    source.close()

    assert before == source.read() == ()
