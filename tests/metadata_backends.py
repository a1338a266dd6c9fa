"""Every metadata backend that a mooncake.json may name, as a real server, with what goes wrong in it during a run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.metadata.prune import read_segments
from mooncake_v0.metadata.store import open_store
from tests import servers


def nothing() -> None:
    """Nothing goes wrong."""


@dataclass(frozen=True)
class Backend:
    """url is for mooncake.json. `fail` breaks the store, `recover` ends that and waits until two segments are in it."""

    url: str
    fail: Callable[[], None] = nothing
    recover: Callable[[], None] = nothing


def start_backend(name: str, folder: Path, stack: ExitStack) -> Backend:
    """Start one of BACKENDS; the stack ends it."""
    return BACKENDS[name](folder, stack)


def _gateway(store: str, stack: ExitStack) -> Backend:
    gateway = start_gateway_thread(store, is_private=False)
    stack.callback(gateway.close)
    return Backend(gateway.url)


def _server(server: servers.Server, stack: ExitStack) -> Backend:
    stack.callback(server.stop)
    return Backend(server.url)


def _etcd_member_killed(folder: Path, stack: ExitStack) -> Backend:
    members = servers.start_etcd_cluster(folder, 3)
    for member in members:
        stack.callback(member.stop)
    return Backend(members[0].url, fail=members[0].kill)


def _redis_restarted(folder: Path, stack: ExitStack) -> Backend:
    server = servers.start_redis(folder)
    stack.callback(server.stop)

    def recover() -> None:
        server.start()  # empty: the agents write their keys again
        servers.wait_until(lambda: _complete_segments(server.url) == 2, "both segments in the new redis", 30)

    return Backend(server.url, server.kill, recover)


def _complete_segments(url: str) -> int:
    store = open_store(url)
    count = sum(len(segment.entries) == 3 for segment in read_segments(store))
    store.close()
    return count


BACKENDS: dict[str, Callable[[Path, ExitStack], Backend]] = {
    "gateway-memory": lambda folder, stack: _gateway("memory:", stack),
    "gateway-sqlite": lambda folder, stack: _gateway(f"sqlite:///{folder}/keys.db", stack),
    "wheel-server": lambda folder, stack: _server(servers.start_wheel_server(folder), stack),
    "etcd": lambda folder, stack: _server(servers.start_etcd(folder), stack),
    "etcd-member-killed": _etcd_member_killed,
    "etcd-auth-tls": lambda folder, stack: _server(
        servers.start_etcd_auth_tls(folder, servers.make_certificates(folder)), stack
    ),
    "redis": lambda folder, stack: _server(servers.start_redis(folder), stack),
    "redis-acl-tls": lambda folder, stack: _server(
        servers.start_redis_acl_tls(folder, servers.make_certificates(folder)), stack
    ),
    "redis-restarted": _redis_restarted,
}
