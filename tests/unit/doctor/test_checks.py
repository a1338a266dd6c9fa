"""Each known trouble of a host, provoked: doctor names exactly it, and a command that repairs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Iterator

import pytest

import mooncake_v0.doctor.catalogue
from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.doctor.host import Host
from mooncake_v0.doctor.report import CHECKS, Outcome, run_checks
from mooncake_v0.metadata.store import open_store
from tests.servers import Server, free_ports, start_redis
from tests.unit.metadata.builders import entry_of, ram, record, rpc_meta

PREFILL, DECODE = Endpoint("127.0.0.1", 23003), Endpoint("127.0.0.1", 23103)
CONFIG = MooncakeConfig(PREFILL, DECODE, "http://192.0.2.9:8080/metadata", "tcp")
RDMA = replace(CONFIG, protocol="rdma", device_names=("mlx5_0",))
CLEAN = {name: value for name, value in os.environ.items() if not name.upper().startswith(("MC_", "VLLM", "HTTP"))}


def host_with(variables: dict[str, str] | None = None, **changes: object) -> Host:
    host = Host(config=CONFIG, environment={**CLEAN, **(variables or {})}, timeout_s=0.5)
    return replace(host, **changes)  # type: ignore[arg-type]


def outcomes(host: Host, check: str) -> list[Outcome]:
    return [result.outcome for result in run_checks(host, [check])]


def only(host: Host, check: str) -> Outcome:
    found = outcomes(host, check)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("variables", "check", "status", "what", "command"),
    [
        ({"MC_MTU": "9"}, "engine-variables", "error", "MC_MTU is '9'", "unset MC_MTU"),
        (
            {"MC_HANDSHAKE_LISTEN_BACKLOG": "many"},
            "engine-variables",
            "error",
            "MC_HANDSHAKE_LISTEN_BACKLOG is 'many'",
            "unset MC_HANDSHAKE_LISTEN_BACKLOG",
        ),
        ({"MC_USE_IPV6": "1"}, "engine-variables", "error", "MC_USE_IPV6", "unset MC_USE_IPV6"),
        (
            {"http_proxy": "http://192.0.2.1:3128"},
            "proxy-variables",
            "error",
            "http_proxy is set and no_proxy does not name 192.0.2.9",
            "export no_proxy=192.0.2.9",
        ),
        (
            {"VLLM_PLUGINS": "other"},
            "plugin-variables",
            "error",
            "VLLM_PLUGINS does not name mooncake_v0",
            "export VLLM_PLUGINS=other,mooncake_v0",
        ),
        (
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            "plugin-variables",
            "error",
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        ),
        ({"VLLM_USE_V1": "1"}, "vllm-engine-variable", "error", "VLLM_USE_V1 is set", "unset VLLM_USE_V1"),
        ({"MASTER_ADDR": "192.0.2.1"}, "old-variables", "warning", "MASTER_ADDR has no effect", "unset MASTER_ADDR"),
        (
            {"VLLM_DISTRIBUTED_KV_ROLE": "producer"},
            "old-variables",
            "warning",
            "VLLM_DISTRIBUTED_KV_ROLE has no effect",
            "unset VLLM_DISTRIBUTED_KV_ROLE",
        ),
        (
            {"MOONCAKE_V0_WAIT_S": "soon"},
            "own-variables",
            "warning",
            "MOONCAKE_V0_WAIT_S is not a number",
            "unset MOONCAKE_V0_WAIT_S",
        ),
        (
            {"MOONCAKE_CONFIG_PATH": "/nowhere/m.json"},
            "own-variables",
            "error",
            "MOONCAKE_CONFIG_PATH names a file that cannot",
            "",
        ),
        (
            {"MOONCAKE_V0_SECRET_FILE": "/nowhere/s"},
            "own-variables",
            "error",
            "MOONCAKE_V0_SECRET_FILE names a file that cannot",
            "",
        ),
        ({}, "log-level", "info", "VLLM_LOGGING_LEVEL is INFO", "export VLLM_LOGGING_LEVEL=DEBUG"),
    ],
)
def test_a_variable_that_breaks_a_pair_is_named_with_its_remedy(
    variables: dict[str, str], check: str, status: str, what: str, command: str
) -> None:
    found = only(host_with(variables), check)
    assert found.status == status
    assert what in found.what
    assert found.command == command
    assert found.fix


@pytest.mark.parametrize(
    "check", ["engine-variables", "proxy-variables", "plugin-variables", "old-variables", "own-variables"]
)
def test_a_clean_environment_has_nothing_wrong(check: str) -> None:
    assert only(host_with(), check).status == "ok"


def test_a_readable_or_short_secret_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    secret.chmod(0o644)
    found = outcomes(host_with({"MOONCAKE_V0_SECRET_FILE": str(secret)}), "own-variables")
    assert [item.command for item in found] == [f"openssl rand -hex 32 > {secret}", f"chmod 600 {secret}"]


# --- libraries and the engine -----------------------------------------------------------------------------------------


@pytest.mark.pin
@pytest.mark.parametrize(
    ("library", "package"),
    [("libibverbs.so.1", "libibverbs1"), ("libcurl.so.4", "libcurl4"), ("libnuma.so.1", "libnuma1")],
)
def test_a_library_of_the_real_engine_that_cannot_be_loaded_is_named_with_its_package(
    tmp_path: Path, library: str, package: str
) -> None:
    (tmp_path / library).write_bytes(b"")
    found = only(host_with({"LD_LIBRARY_PATH": str(tmp_path)}), "shared-libraries")
    assert found.what == f"the engine needs {library}, which cannot be loaded"
    assert "file too short" in found.evidence
    assert found.command.startswith(f"apt-get install {package} ")


def make_fake_engine(folder: Path, code: str) -> dict[str, str]:
    """A package `mooncake` whose module `engine` runs the code when it is imported; returns the environment for it."""
    (folder / "mooncake").mkdir()
    (folder / "mooncake" / "__init__.py").touch()
    (folder / "mooncake" / "engine.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


class FakeEngineHost(Host):
    """A host on which the engine is another folder."""

    def module_folder(self, name: str) -> Path | None:
        return Path(self.environment["PYTHONPATH"]) / name


def test_a_library_that_is_nowhere_is_named(tmp_path: Path) -> None:
    variables = make_fake_engine(tmp_path, "")
    for name, source in (
        ("absent", "int absent(void) { return 1; }"),
        ("engine", "int absent(void); int f(void) { return absent(); }"),
    ):
        (tmp_path / f"{name}.c").write_text(source)
    compile_ = ["cc", "-shared", "-fPIC", "-o"]
    subprocess.run(
        [*compile_, "libabsent.so.7", "absent.c", "-Wl,-soname,libabsent.so.7"], cwd=tmp_path, check=True, timeout=60
    )
    subprocess.run(
        [*compile_, "mooncake/engine.so", "engine.c", "./libabsent.so.7"], cwd=tmp_path, check=True, timeout=60
    )
    (tmp_path / "libabsent.so.7").unlink()
    found = only(FakeEngineHost(environment={**CLEAN, **variables}), "shared-libraries")
    assert found.what == "the engine needs libabsent.so.7, which cannot be loaded"
    assert found.command == "apt-file search libabsent.so.7"


@pytest.mark.pin
def test_an_engine_that_aborts_at_import_is_a_finding_and_not_the_end(tmp_path: Path) -> None:
    found = only(host_with({"MC_HANDSHAKE_LISTEN_BACKLOG": "many"}), "engine-import")
    # a note: engine-variables has the error
    assert (found.status, found.what) == ("info", "importing the engine ends with signal SIGABRT")
    assert found.fix == "repair what engine-variables names"


def test_an_engine_that_segfaults_at_import_is_a_finding_and_not_the_end(tmp_path: Path) -> None:
    variables = make_fake_engine(tmp_path, "import ctypes\nctypes.string_at(0)\n")
    found = only(FakeEngineHost(environment={**CLEAN, **variables}), "engine-import")
    assert (found.status, found.what) == ("error", f"importing the engine ends with signal {signal.SIGSEGV.name}")


@pytest.mark.pin
def test_the_pinned_environment_has_nothing_wrong() -> None:
    host = host_with()
    names = ["python-version", "c-library", "cpu-flags", "pinned-versions", "version-drift", "shared-libraries"]
    names += ["engine-import", "plugin-entry-points"]
    assert {result.outcome.status for result in run_checks(host, names)} == {"ok"}


# --- versions ---------------------------------------------------------------------------------------------------------


class OtherVersions(Host):
    """A host with other versions installed; a real one is made in tests/test_packaging.py."""

    def version(self, package: str) -> str | None:
        return {"vllm": "0.6.5", "mooncake-transfer-engine": "0.3.3", "transformers": "5.24.0"}.get(package)


def test_wrong_pins_are_errors_that_say_why() -> None:
    vllm, engine = outcomes(OtherVersions(), "pinned-versions")
    assert vllm.what == "vllm is 0.6.5: it is not one of the tested versions"
    assert "'vllm==0.6.4.post1'" in vllm.command
    assert "AddressSanitizer" in engine.what
    assert "'mooncake-transfer-engine==0.3.3.post2'" in engine.command


def test_drift_from_the_tested_set_is_one_warning_with_one_command() -> None:
    found = only(OtherVersions(), "version-drift")
    assert found.status == "warning"
    assert "transformers 5.24.0, tested with 4.46.3" in found.evidence
    assert "'transformers==4.46.3'" in found.command


def test_an_old_cpu_is_named(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse sse2 avx\n")

    class CpuBuild(Host):
        def version(self, package: str) -> str | None:
            return "0.6.4.post1+cpu"

    assert "no AVX2" in only(CpuBuild(proc=tmp_path), "cpu-flags").what


# --- memory, GPUs, RDMA -----------------------------------------------------------------------------------------------


def test_buffers_larger_than_memory_are_named_with_both_numbers() -> None:
    found = only(host_with(kv_buffer_bytes=1 << 50, local=("prefill", "decode")), "host-memory")
    assert found.status == "error"
    assert "2097152.0 GiB" in found.what


@pytest.mark.parametrize(("kills", "status"), [(0, "ok"), (3, "warning")])
def test_processes_that_the_kernel_ended_for_lack_of_memory_are_counted(
    tmp_path: Path, kills: int, status: str
) -> None:
    (tmp_path / "vmstat").write_text(f"nr_free_pages 1234\noom_kill {kills}\n")
    found = only(host_with(proc=tmp_path), "memory-kills")
    assert found.status == status
    assert (str(kills) in found.what) == (status == "warning")


@pytest.mark.parametrize(("used_mib", "status"), [(1000, "ok"), (30000, "error")])
def test_a_gpu_that_others_use_is_named_with_a_share_that_fits(tmp_path: Path, used_mib: int, status: str) -> None:
    # no GPU here: nvidia-smi's documented csv output is written by a script
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\necho '0, NVIDIA H200, 143771, {used_mib}'\n")
    script.chmod(0o755)
    found = only(host_with({"PATH": str(tmp_path)}), "gpu-memory")
    assert found.status == status
    assert ("--gpu-memory-utilization 0.77" in found.fix) == (status == "error")


def test_rdma_without_any_device_is_named(tmp_path: Path) -> None:
    found = only(host_with(config=RDMA, sys=tmp_path), "rdma-access")
    assert (found.status, found.what) == ("error", "the kernel has no RDMA device")


def test_rdma_devices_that_the_container_does_not_have_are_named(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband_verbs/uverbs0").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    found = only(host_with(config=RDMA, sys=tmp_path / "sys", proc=tmp_path / "proc"), "rdma-access")
    assert found.what.startswith("/dev/infiniband/uverbs0 is not here")
    assert "--device=/dev/infiniband" in found.fix


def test_nvidia_peermem_is_a_note(tmp_path: Path) -> None:
    (tmp_path / "modules").write_text("nvidia 123 0 - Live 0x0\nmlx5_core 1 0 - Live 0x0\n")
    found = only(host_with(config=RDMA, proc=tmp_path), "nvidia-peermem")
    assert (found.status, found.command) == ("info", "modprobe nvidia_peermem")


def test_ports_that_the_kernel_gives_to_clients_are_named() -> None:
    config = replace(CONFIG, prefill=Endpoint("127.0.0.1", 45000))
    found = only(host_with(config=config, local=("prefill",)), "local-port-range")
    assert found.status == "warning"
    assert found.command == "sysctl net.ipv4.ip_local_reserved_ports=45000-45032"


# --- the metadata store -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


def publish(url: str, *, pid: int, seen_ago_s: float) -> str:
    """The keys of an instance on this host at whose port nobody listens; returns its name."""
    name = f"127.0.0.1:{free_ports(1)[0]}"
    known = record(name, pid=pid, hostname=socket.gethostname(), seen_ago_s=seen_ago_s)
    store = open_store(url)
    for entry in (entry_of(known), rpc_meta(name), ram(name)):
        store.put(entry.key, entry.value)
    store.close()
    return name


def ended_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait(30)
    return done.pid


def test_stale_keys_are_named_with_the_command_that_removes_them(redis: Server) -> None:
    url = f"{redis.url}/1"
    name = publish(url, pid=ended_pid(), seen_ago_s=3600)
    found = only(host_with(config=replace(CONFIG, metadata_server=url)), "metadata-keys")
    assert found.what.startswith(f"{name}: its process is gone")
    assert found.command == "mooncake-v0 metadata prune mooncake.json"


def test_a_clock_that_runs_ahead_shows_in_the_store(redis: Server) -> None:
    url = f"{redis.url}/2"
    publish(url, pid=os.getpid(), seen_ago_s=-500)
    found = only(host_with(config=replace(CONFIG, metadata_server=url)), "metadata-clock")
    assert f"the clock of {socket.gethostname()} is" in found.what
    assert found.command == "timedatectl set-ntp true"


def test_an_empty_store_has_nothing_wrong(redis: Server) -> None:
    found = only(host_with(config=replace(CONFIG, metadata_server=f"{redis.url}/3")), "metadata-keys")
    assert found.status == "ok"


def test_a_store_that_does_not_answer_skips_the_check_with_the_reason() -> None:
    config = replace(CONFIG, metadata_server=f"http://127.0.0.1:{free_ports(1)[0]}/metadata")
    assert only(host_with(config=config), "metadata-keys").status == "skipped"


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_can_be_explained(name: str) -> None:
    from mooncake_v0.cli.explain import explanations

    assert len(explanations()[name].text) > 60


def test_a_bare_host_without_config_runs_every_check() -> None:
    host = Host(environment={"PATH": str(Path(shutil.which("ldd") or "/usr/bin/ldd").parent)})
    assert {result.check for result in run_checks(host)} == set(CHECKS)


def test_every_finding_of_metadata_check_and_launch_can_be_explained() -> None:
    from mooncake_v0.cli.explain import explanations

    package = Path(mooncake_v0.doctor.catalogue.__file__).parents[1]
    sources = (package / "metadata" / "check.py", package / "cli" / "launch_checks.py")
    names = {name for source in sources for name in re.findall(r'"((?:metadata|launch)-[a-z-]+)"', source.read_text())}
    assert len(names) > 10
    assert names - set(explanations()) == set()
