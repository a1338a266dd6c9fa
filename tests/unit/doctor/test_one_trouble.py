"""One trouble at a time, provoked for real on a host that is otherwise right: doctor names exactly it, with its remedy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

from mooncake_v0.cli.doctor import Request, examine
from mooncake_v0.doctor.host import Host
from mooncake_v0.metadata.store import open_store
from mooncake_v0.pin.processes import find_free_range
from tests.servers import free_ports, start_redis
from tests.unit.doctor.test_checks import CLEAN, ended_pid, publish
from tests.unit.metadata.builders import entry_of, ram, record, rpc_meta

pytestmark = pytest.mark.pin


@dataclass(frozen=True)
class Place:
    """A pair on this host, not started, and what a test may make wrong with it."""

    folder: Path
    base: int
    redis: str

    def config(self, **fields: Any) -> dict[str, Any]:
        sides = {"prefill_url": f"127.0.0.1:{self.base}", "decode_url": f"127.0.0.1:{self.base + 100}"}
        return {**sides, "metadata_server": self.redis, "protocol": "tcp", "device_name": "", **fields}

    def troubles(self, variables: dict[str, str], config: dict[str, Any], **host: Any) -> dict[str, tuple[str, str]]:
        """Check -> (what, fix and command) of every error and warning that doctor has."""
        path = self.folder / "mooncake.json"
        path.write_text(json.dumps(config))
        known = Host(config_path=str(path), environment={**CLEAN, **variables}, kv_buffer_bytes=10**6, timeout_s=1.0)
        # whether other programs of this machine were ended is not ours to provoke
        (self.folder / "vmstat").write_text("oom_kill 0\n")
        results = examine(Request(str(path), None, Path("/sys"), ()), replace(known, **host))
        return {
            result.check: (result.outcome.what, f"{result.outcome.fix}\n{result.outcome.command}")
            for result in results
            if result.outcome.status in ("error", "warning") and result.check != "memory-kills"
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    redis = start_redis(folder)
    yield Place(folder, find_free_range(150), f"{redis.url}/5")
    redis.stop()


def test_a_host_that_is_right_has_no_trouble(place: Place) -> None:
    assert place.troubles({}, place.config()) == {}


VARIABLES = [
    ("MC_MTU", "9", "engine-variables", "unset MC_MTU"),
    ("MC_HANDSHAKE_LISTEN_BACKLOG", "many", "engine-variables", "unset MC_HANDSHAKE_LISTEN_BACKLOG"),
    ("VLLM_PLUGINS", "other", "plugin-variables", "export VLLM_PLUGINS=other,mooncake_v0"),
    ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "plugin-variables", "unset TORCH_DEVICE_BACKEND_AUTOLOAD"),
    ("VLLM_USE_V1", "1", "vllm-engine-variable", "unset VLLM_USE_V1"),
    ("VLLM_DISTRIBUTED_KV_ROLE", "producer", "old-variables", "unset VLLM_DISTRIBUTED_KV_ROLE"),
    ("MOONCAKE_CONFIG_PATH", "/nowhere/mooncake.json", "own-variables", "correct the path"),
]


@pytest.mark.parametrize(("name", "value", "check", "remedy"), VARIABLES)
def test_a_variable_is_one_trouble(place: Place, name: str, value: str, check: str, remedy: str) -> None:
    """Two of them make the real engine abort at import; that is a consequence, and no second error."""
    (found,) = place.troubles({name: value}, place.config()).items()
    assert found[0] == check
    assert name in found[1][0]
    assert remedy in found[1][1]


def test_a_proxy_before_the_metadata_server_is_one_trouble(place: Place) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "mooncake_v0", "metadata", "serve", "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = next(
                word for line in iter(server.stdout.readline, "") for word in line.split() if "/metadata" in word
            )
            config = place.config(metadata_server=url)
            assert place.troubles({}, config) == {}
            (found,) = place.troubles({"http_proxy": "http://192.0.2.1:3128"}, config).items()
        finally:
            server.terminate()
    assert found[0] == "proxy-variables"
    assert "export no_proxy=127.0.0.1" in found[1][1]


def test_a_library_that_cannot_be_loaded_is_one_trouble(place: Place, tmp_path: Path) -> None:
    (tmp_path / "libcurl.so.4").write_bytes(b"")
    (found,) = place.troubles({"LD_LIBRARY_PATH": str(tmp_path)}, place.config()).items()
    assert found[0] == "shared-libraries"
    assert "apt-get install libcurl4" in found[1][1]


def test_a_metadata_server_that_is_not_there_is_one_trouble(place: Place) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}/metadata"
    (found,) = place.troubles({}, place.config(metadata_server=url)).items()
    assert found[0] == "online-metadata-unreachable"


def test_a_taken_port_is_one_trouble(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.base + 101)):
        (found,) = place.troubles({}, place.config()).items()
    assert found[0] == "online-port-busy"
    assert f"port {place.base + 101} " in found[1][0]
    assert "ss -ltnp" in found[1][1]


def test_another_program_at_the_side_channel_is_not_taken_for_the_instance(place: Place) -> None:
    with ExitStack() as stack:
        for port in (place.base, place.base + 1, place.base + 32):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert set(place.troubles({}, place.config())) == {"online-port-busy"}


def test_ports_of_the_kernels_range_are_one_trouble(place: Place) -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    troubles = place.troubles({}, place.config(prefill_url=f"127.0.0.1:{first + 2000}"))
    troubles.pop("online-port-busy", None)  # the very trouble: a connection of this machine may hold one now
    (found,) = troubles.items()
    assert found[0] == "local-port-range"
    assert f"sysctl net.ipv4.ip_local_reserved_ports={first + 2000}" in found[1][1]


def test_buffers_that_do_not_fit_are_one_trouble(place: Place) -> None:
    (found,) = place.troubles({}, place.config(), kv_buffer_bytes=1 << 50).items()
    assert found[0] == "host-memory"
    assert "mooncake-v0 size" in found[1][1]


KEYS: list[tuple[str, Callable[[str], list[Any]], str]] = [
    ("half written", lambda name: [ram(name)], "metadata-half-published"),
    ("corrupt", lambda name: [replace(ram(name), value=b"{"), rpc_meta(name)], "metadata-corrupt-value"),
]


@pytest.mark.parametrize(("name", "entries", "rule"), KEYS, ids=lambda value: value if isinstance(value, str) else "")
def test_keys_that_are_wrong_are_one_trouble(
    place: Place, name: str, entries: Callable[[str], list[Any]], rule: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as living:
        segment = f"127.0.0.1:{living.getsockname()[1] - 1}"
        mine = entry_of(record(segment, pid=os.getpid(), hostname=socket.gethostname()))
        with_keys = [mine, *entries(segment)]
        store = open_store(place.redis)
        try:
            for entry in with_keys:
                store.put(entry.key, entry.value)
            (found,) = place.troubles({}, place.config()).items()
        finally:
            for entry in with_keys:
                store.delete(entry.key)
            store.close()
    assert found[0] == "metadata-keys"
    assert f"[{rule}]" in found[1][0]


def test_keys_of_a_dead_instance_are_one_trouble(place: Place) -> None:
    name = publish(place.redis, pid=ended_pid(), seen_ago_s=3600)
    try:
        (found,) = place.troubles({}, place.config()).items()
    finally:
        store = open_store(place.redis)
        for key in [entry.key for entry in store.list("mooncake") if name in entry.key]:
            store.delete(key)
        store.close()
    assert found[0] == "metadata-keys"
    assert f"mooncake-v0 metadata prune {place.folder}/mooncake.json" in found[1][1]


# --- what the C library says: a real doctor, with one function of the library replaced ---------------------------------

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>
size_t confstr(int name, char *out, size_t size) {
    const char *old = "glibc 2.31";
    if (name != _CS_GNU_LIBC_VERSION) return ((size_t (*)(int, char *, size_t))dlsym(RTLD_NEXT, "confstr"))(name, out, size);
    if (out && size) { strncpy(out, old, size); out[size - 1] = 0; }
    return strlen(old) + 1;
}
"""


def test_an_old_c_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "shim.c").write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "shim.so", "shim.c"], cwd=tmp_path, check=True, timeout=60)
    done = subprocess.run(
        [sys.executable, "-m", "mooncake_v0", "doctor", "--only", "c-library", "--format", "json"],
        env={**os.environ, "LD_PRELOAD": str(tmp_path / "shim.so")},
        capture_output=True,
        timeout=60,
    )
    (found,) = json.loads(done.stdout)["results"]
    assert (done.returncode, found["status"]) == (1, "error")
    assert found["what"] == "glibc 2.31 is older than 2.35"
    assert "Debian 12" in found["fix"]
