from __future__ import annotations

import os
import socket
import time

import pytest

from mooncake_v0.metadata.liveness import ALIVE, STALE, UNSURE, Judge, is_loopback, judge_segments
from mooncake_v0.metadata.probes import ANSWERS, REFUSED
from tests.servers import free_ports
from tests.unit.metadata.builders import entry_of, ram, record, rpc_meta, segment

REMOTE = "10.0.0.7:13003"
LOOPBACK = "127.0.0.1:13003"
SILENT = "10.0.0.7:13004 does not answer"
HERE = "this-host"


def verdict(name: str, probe: str, judge: Judge | None = None, **fields: object) -> str:
    entries = [ram(name), rpc_meta(name)]
    entries += [entry_of(record(name, **fields))] if fields else []  # type: ignore[arg-type]
    return (judge or Judge()).liveness(segment(*entries), probe, now=time.time(), hostname=HERE).status


@pytest.mark.parametrize(
    ("probe", "fields", "expected"),
    [
        (ANSWERS, {}, ALIVE),
        (ANSWERS, {"seen_ago_s": 9999}, ALIVE),
        (REFUSED, {}, STALE),
        (REFUSED, {"seen_ago_s": 9999}, STALE),
        (REFUSED, {"seen_ago_s": 5}, UNSURE),  # a firewall can refuse for a living process
        (REFUSED, {"seen_ago_s": 5, "hostname": HERE, "pid": 2**22 + 1}, STALE),
        (REFUSED, {"seen_ago_s": 5, "hostname": HERE, "pid": os.getpid()}, UNSURE),
        (SILENT, {}, UNSURE),
        (SILENT, {"seen_ago_s": 5}, ALIVE),
        (SILENT, {"seen_ago_s": 9999}, UNSURE),
    ],
)
def test_a_segment_on_another_host(probe: str, fields: dict[str, object], expected: str) -> None:
    assert verdict(REMOTE, probe, **fields) == expected


@pytest.mark.parametrize(
    ("probe", "fields", "judge", "expected"),
    [
        (REFUSED, {}, Judge(), UNSURE),  # whose loopback?
        (ANSWERS, {}, Judge(), UNSURE),
        (REFUSED, {"seen_ago_s": 9999}, Judge(), UNSURE),
        (REFUSED, {"seen_ago_s": 9999, "hostname": HERE}, Judge(), STALE),
        (ANSWERS, {"seen_ago_s": 9999, "hostname": HERE}, Judge(), ALIVE),
        (REFUSED, {}, Judge(is_local=True), STALE),
        (ANSWERS, {}, Judge(is_local=True), ALIVE),
    ],
)
def test_a_segment_that_published_a_loopback_address(
    probe: str, fields: dict[str, object], judge: Judge, expected: str
) -> None:
    assert verdict(LOOPBACK, probe, judge, **fields) == expected


@pytest.mark.parametrize(
    ("probe", "seen_ago_s", "expected"), [(SILENT, 4000, STALE), (SILENT, 3000, UNSURE), (ANSWERS, 4000, ALIVE)]
)
def test_a_host_that_is_gone_counts_only_when_asked_for(probe: str, seen_ago_s: float, expected: str) -> None:
    assert verdict(REMOTE, probe, Judge(unreachable_after_s=3600), seen_ago_s=seen_ago_s) == expected


def test_real_ports_are_asked() -> None:
    (closed,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_port = listener.getsockname()[1]
        names = {f"127.0.0.1:{open_port - 1}": ALIVE, f"127.0.0.1:{closed - 1}": STALE, "nobody": UNSURE}
        segments = [segment(ram(name)) for name in names]

        found = judge_segments(segments, Judge(is_local=True))

    assert {name: liveness.status for name, liveness in found.items()} == names


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("128.0.0.1", False),
        ("10.0.0.7", False),
        ("::1", True),
        ("::2", False),
        ("localhost", True),
        ("a.localhost", True),
        ("127.1", False),  # only some resolvers read it so
        ("127.0.0.1.example", False),
        ("zero\0byte", False),
        ("", False),
    ],
)
def test_what_means_the_own_host(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
