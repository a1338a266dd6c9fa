"""Start and stop the processes of a pair on one host: metadata server, prefill, decode, proxy.

`demo` and the tests use it. Every process has a session of its own and a log file; `stop` ends exactly those.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Mapping, Sequence

from mooncake_v0.config.load import load_config
from mooncake_v0.config.model import Role
from mooncake_v0.errors import AgentUnavailableError, CouldNotCheckError
from mooncake_v0.transfer.messages import Status
from mooncake_v0.transfer.status import query_status

STOP_S = 15.0
_PORTS_OF_A_SIDE = 48
_KV_ROLES = {"prefill": ("kv_producer", 0), "decode": ("kv_consumer", 1)}


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


FREE_PORTS = range(20_000, 32_000)
_PROCESSES = 16
_given: deque[range] = deque(maxlen=16)  # to this process, which may not use them yet


def find_free_range(count: int) -> int:
    """First port of `count` free ones in a row, below the range from which the kernel picks client ports.

    Processes look in different places first, and one that asks again gets others: ports are taken long after they were
    found free.
    """
    places = range(FREE_PORTS.start, FREE_PORTS.stop - count + 1, count)
    own = places[os.getpid() % _PROCESSES :: _PROCESSES]
    bases = [*random.sample(own, len(own)), *random.sample(places, len(places))]
    for base in sorted(bases, key=lambda base: _was_given(range(base, base + count))):  # its order stays otherwise
        if all(_is_free(base + i) for i in range(count)):
            _given.append(range(base, base + count))
            return base
    raise CouldNotCheckError(f"no {count} free ports in a row on this host", fix="stop some servers")


def _was_given(ports: range) -> bool:
    return any(ports.start < other.stop and other.start < ports.stop for other in _given)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@dataclass
class ManagedProcess:
    """One child with its log; `ready_url` answers 200 when it serves."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    ready_url: str

    @property
    def pid(self) -> int:
        return self.popen.pid

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.ready_url, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole session: nothing of it is left."""
        self.ask_to_end()
        self.end()

    def ask_to_end(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()

    def end(self) -> None:
        """After `ask_to_end`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@dataclass
class PairOptions:
    """What to start. metadata_url None starts our own metadata server; vllm_args go to both instances.

    gpus: CUDA_VISIBLE_DEVICES of prefill, decode and plain, where it is to be set
    """

    model: str
    folder: Path
    tp: int = 1
    metadata_url: str | None = None
    kv_buffer_size: float = 1e9
    vllm_args: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, str] = field(default_factory=dict)


class Pair:
    """The processes of one pair on loopback. `start_all` once; `stop_all` in every case."""

    def __init__(self, options: PairOptions) -> None:
        self.options = options
        options.folder.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, ManagedProcess] = {}
        self.engine_port = find_free_range(100 + _PORTS_OF_A_SIDE)
        self.api_ports = {"prefill": find_free_port(), "decode": find_free_port()}
        self.proxy_port = find_free_port()
        self.metadata_port = find_free_port()
        self.metadata_url = options.metadata_url or f"http://127.0.0.1:{self.metadata_port}/metadata"
        self.config_path = options.folder / "mooncake.json"
        self.write_config()

    @property
    def proxy_url(self) -> str:
        return f"http://127.0.0.1:{self.proxy_port}"

    def api_url(self, role: str) -> str:
        return f"http://127.0.0.1:{self.api_ports[role]}"

    def write_config(self, **changes: str) -> None:
        """mooncake.json as documented: equal URLs, so decode's ports are 100 higher."""
        endpoint = f"127.0.0.1:{self.engine_port}"
        config = {
            "prefill_url": endpoint,
            "decode_url": endpoint,
            "metadata_server": self.metadata_url,
            "protocol": "tcp",
            "device_name": "",
            **changes,
        }
        self.config_path.write_text(json.dumps(config, indent=2) + "\n")

    def start_all(self, while_waiting: Callable[[ManagedProcess], None] = lambda process: None) -> None:
        """Start everything and wait until it serves; raises CouldNotCheckError with the log's end if one dies."""
        if self.options.metadata_url is None:
            self.wait_ready(self.start_metadata(), while_waiting)
        for instance in [self.start_instance("prefill"), self.start_instance("decode")]:
            self.wait_ready(instance, while_waiting)
        self.wait_ready(self.start_proxy(), while_waiting)

    def start_metadata(self) -> ManagedProcess:
        command = [sys.executable, "-m", "mooncake_v0", "metadata", "serve", "--port", str(self.metadata_port)]
        return self._start("metadata", command, f"http://127.0.0.1:{self.metadata_port}/health")

    def start_instance(self, role: str, extra_args: Sequence[str] = ()) -> ManagedProcess:
        """The documented command line."""
        kv_role, kv_rank = _KV_ROLES[role]
        transfer = {
            "kv_connector": "MooncakeConnector",
            "kv_role": kv_role,
            "kv_rank": kv_rank,
            "kv_parallel_size": 2,
            "kv_buffer_size": self.options.kv_buffer_size,
        }
        args = [*self.options.vllm_args, *extra_args, "--kv-transfer-config", json.dumps(transfer)]
        return self._start(
            role,
            vllm_command(self.options.model, self.api_ports[role], self.options.tp, args),
            f"{self.api_url(role)}/health",
            self._gpus(role),
        )

    def start_plain(
        self, port: int, extra_args: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> ManagedProcess:
        """One instance without transfer, to compare with; `environment` is added to that of the others."""
        args = [*self.options.vllm_args, *extra_args]
        command = vllm_command(self.options.model, port, self.options.tp, args)
        more = {**self._gpus("plain"), **(environment or {})}
        return self._start("plain", command, f"http://127.0.0.1:{port}/health", more)

    def start_proxy(self) -> ManagedProcess:
        command = [sys.executable, "-m", "mooncake_v0", "proxy", "--port", str(self.proxy_port)]
        command += ["--prefill", self.api_url("prefill"), "--decode", self.api_url("decode"), "--drain-delay", "0"]
        return self._start("proxy", command, f"{self.proxy_url}/health")

    def wait_ready(
        self,
        process: ManagedProcess,
        while_waiting: Callable[[ManagedProcess], None] = lambda process: None,
        timeout_s: float = 600.0,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not process.is_ready():
            if process.popen.poll() is not None:
                raise CouldNotCheckError(
                    f"{process.name} has ended with exit code {process.popen.returncode}:\n{process.log_tail()}",
                    fix=f"the whole log is in {process.log}",
                )
            if time.monotonic() > deadline:
                raise CouldNotCheckError(
                    f"{process.name} does not serve after {timeout_s:.0f} s:\n{process.log_tail()}",
                    fix=f"the whole log is in {process.log}",
                )
            while_waiting(process)
            time.sleep(0.2)

    def agent_status(self, role: Role, rank: int = 0, *, timeout_s: float = 2.0) -> Status:
        """The state of one transfer agent; raises AgentUnavailableError."""
        ports = load_config(self.config_path).ports(role, rank)
        return query_status(ports.host, ports.side_channel, timeout_s=timeout_s)

    def wait_connected(self, timeout_s: float = 60.0) -> None:
        """Until every rank of decode has its peer and knows how entries come: from now on prompts are transferred."""
        deadline = time.monotonic() + timeout_s
        for rank in range(self.options.tp):
            problem = "has not answered"
            while True:
                with contextlib.suppress(AgentUnavailableError):
                    status = self.agent_status("decode", rank)
                    if status.peer_epoch and status.transport:
                        break
                    problem = f"engine {status.engine}, peer {status.peer}"
                if time.monotonic() > deadline:
                    raise CouldNotCheckError(
                        f"decode's agent of rank {rank} has no peer: {problem}", fix="see the logs"
                    )
                time.sleep(0.1)

    def stop(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            process.stop()

    def stop_all(self) -> None:
        """All at once, but the metadata server last: agents remove their keys."""
        together = [name for name in self.processes if name != "metadata"]
        for name in together:
            self.processes[name].ask_to_end()
        for name in together:
            self.processes.pop(name).end()
        self.stop("metadata")

    def _gpus(self, name: str) -> dict[str, str]:
        gpus = self.options.gpus.get(name)
        return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}

    def _start(
        self, name: str, command: Sequence[str], ready_url: str, more: Mapping[str, str] | None = None
    ) -> ManagedProcess:
        log = self.options.folder / f"{name}.log"
        environment = {**os.environ, "MOONCAKE_CONFIG_PATH": str(self.config_path), **self.options.environment}
        environment.update(more or {})
        with log.open("ab") as output, _signals_after():
            popen = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            self.processes[name] = ManagedProcess(name, popen, log, ready_url)
        return self.processes[name]


@contextlib.contextmanager
def _signals_after() -> Iterator[None]:
    """Ctrl-C and SIGTERM count after the block: amid a start, `stop_all` would not know the new process yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for caught in came[:1]:
            signal.raise_signal(caught)


def vllm_command(model: str, port: int, tp: int, args: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    return [*command, "--port", str(port), "--tensor-parallel-size", str(tp), *args]
