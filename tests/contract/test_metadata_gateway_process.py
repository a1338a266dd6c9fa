"""The private gateway of a transfer agent: beside a real engine in the same process, and through every death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata.gateway_process import start_gateway_process
from mooncake_v0.metadata.store import open_store
from tests.engine_child import free_name
from tests.servers import wait_until

BESIDE_AN_ENGINE = """
import os, sys
from mooncake_v0.metadata.gateway_process import start_gateway_process
os.environ["MC_LEGACY_RPC_PORT_BINDING"] = "1"
from mooncake.engine import TransferEngine
gateway = start_gateway_process(sys.argv[1])
engine = TransferEngine()
code = engine.initialize(sys.argv[2], gateway.url, "tcp", "")
del engine
gateway.close()
print("code", code)
"""
HOLDS_ONE = """
import sys, time
from mooncake_v0.metadata.gateway_process import start_gateway_process
gateway = start_gateway_process("memory:")
print(gateway.masked_url, gateway._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.pin
def test_an_engine_starts_over_the_gateway_of_its_own_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BESIDE_AN_ENGINE, f"sqlite:///{tmp_path}/keys.db", free_name()]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.stdout.splitlines()[-1] == "code 0"


def test_a_gateway_that_was_killed_comes_back_at_its_address_with_its_login(tmp_path: Path) -> None:
    gateway = start_gateway_process(f"sqlite:///{tmp_path}/keys.db")
    url, store = gateway.url, open_store(gateway.url)
    store.put("mooncake/a", b"1")
    pid = gateway._process.pid

    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not gateway.is_alive, "the death")
    gateway.ensure_alive()
    gateway.ensure_alive()  # a living one is left alone

    assert (gateway.url, store.get("mooncake/a")) == (url, b"1")
    assert gateway._process.pid != pid
    store.close()
    gateway.close()
    assert not gateway.is_alive
    gateway.close()


def test_a_gateway_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", HOLDS_ONE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().split()[1])

    parent.kill()
    parent.wait(10)
    parent.stdout.close()

    wait_until(lambda: not psutil.pid_exists(pid), "the end of the gateway")


def test_a_store_password_is_in_no_process_list(tmp_path: Path) -> None:
    gateway = start_gateway_process("redis://:geheim-77@127.0.0.1:1")
    shown = " ".join(psutil.Process(gateway._process.pid).cmdline())
    environment = " ".join(psutil.Process(gateway._process.pid).environ().values())
    gateway.close()

    assert "metadata.gateway_process" in shown
    assert "geheim-77" not in shown + environment


@pytest.mark.parametrize("url", ["nonsense", "sqlite:///missing-folder/x.db"])
def test_a_url_that_cannot_work_is_an_error_with_its_fix(url: str) -> None:
    with pytest.raises(MetadataError) as caught:
        start_gateway_process(url)

    assert caught.value.fix
