"""Two hosts on one machine: network namespaces with a cable between them, and addresses that are nobody else's there."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack, contextmanager
from typing import Iterator, Mapping

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def inside(namespace: str) -> list[str]:
    """What to write before a command that shall run on that host."""
    return ["ip", "netns", "exec", namespace]


@contextmanager
def two_hosts(addresses: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Side -> name of its namespace, for side -> IPv4 address in one /24. Skips the test without root's rights."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    # random, so that two runs and two modules of one run do not meet
    tag = os.urandom(3).hex()
    names = {side: f"mc{tag}{number}" for number, side in enumerate(addresses)}
    with ExitStack() as stack:
        for name in names.values():
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        first, second = names.values()
        ip("-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for side, name in names.items():
            ip("-n", name, "addr", "add", f"{addresses[side]}/24", "dev", "wire")
            for link in ("lo", "wire"):
                ip("-n", name, "link", "set", link, "up")
        yield names


@contextmanager
def blocked(namespace: str, port: int) -> Iterator[None]:
    """Meanwhile drop what comes in for that TCP port, as a firewall does."""
    rule = ("-n", namespace, "rule")
    ip(*rule, "add", "pref", "10", "iif", "wire", "ipproto", "tcp", "dport", str(port), "blackhole")
    ip(*rule, "add", "pref", "20", "lookup", "local")
    ip(*rule, "del", "pref", "0")
    try:
        yield
    finally:
        ip(*rule, "add", "pref", "0", "lookup", "local")
        ip(*rule, "del", "pref", "20")
        ip(*rule, "del", "pref", "10")
