"""The pair under test: prefill behind the cable where there is one, all else beside the clients."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Sequence

import psutil

from mooncake_v0.pin.processes import ManagedProcess, Pair, PairOptions
from tests.e2e.conftest import ENVIRONMENT, VLLM_ARGS
from tests.soak.chaos.link import DECODE_ADDRESS, PREFILL_ADDRESS, Link

KV_BUFFER_BYTES = 100_000_000  # a tenth of what the soak's prompts have together: entries are evicted all the time
# 24,000 tokens: full at times, so that requests are preempted; and all of it is touched while warming up, so that its
# memory does not look like a leak
KV_BLOCKS = 1500
INSTANCES = ("prefill", "decode")
LOOPBACK = "127.0.0.1"
# as it is by itself: through the engine between the namespaces, prefill's buffer mapped on loopback
SOAK_ENVIRONMENT = {**ENVIRONMENT, "MOONCAKE_V0_TRANSPORT": "auto"}


class SoakPair(Pair):
    """link None: everything on loopback, as in other tests."""

    def __init__(self, model: str, folder: Path, link: Link | None) -> None:
        self.link = link
        self.addresses = (
            {"prefill": PREFILL_ADDRESS, "decode": DECODE_ADDRESS} if link else dict.fromkeys(INSTANCES, LOOPBACK)
        )
        options = PairOptions(
            model,
            folder,
            kv_buffer_size=KV_BUFFER_BYTES,
            vllm_args=[*VLLM_ARGS, "--num-gpu-blocks-override", str(KV_BLOCKS)],
            environment=dict(SOAK_ENVIRONMENT),
        )
        super().__init__(options)
        self.metadata_url = f"http://{self.addresses['decode']}:{self.metadata_port}/metadata"
        endpoints = {role: f"{address}:{self.engine_port}" for role, address in self.addresses.items()}
        self.write_config(prefill_url=endpoints["prefill"], decode_url=endpoints["decode"])

    def api_url(self, role: str) -> str:
        return f"http://{self.addresses[role]}:{self.api_ports[role]}"

    def start_metadata(self) -> ManagedProcess:
        host = self.addresses["decode"]
        command = [sys.executable, "-m", "mooncake_v0", "metadata", "serve"]
        command += ["--host", host, "--port", str(self.metadata_port)]
        return self._start("metadata", command, f"http://{host}:{self.metadata_port}/health")

    def start_instance(self, role: str, extra_args: Sequence[str] = ()) -> ManagedProcess:
        """As documented, listening at this instance's own address (of two --host the last one counts)."""
        self.options.environment = {**SOAK_ENVIRONMENT, "VLLM_HOST_IP": self.addresses[role]}
        return super().start_instance(role, ["--host", self.addresses[role], *extra_args])

    def start_proxy(self) -> ManagedProcess:
        command = [sys.executable, "-m", "mooncake_v0", "proxy", "--port", str(self.proxy_port)]
        command += ["--access-log", str(self.options.folder / "access.jsonl")]
        command += ["--prefill", self.api_url("prefill"), "--decode", self.api_url("decode"), "--drain-delay", "0"]
        return self._start("proxy", command, f"{self.proxy_url}/health")

    def start_servers(self) -> None:
        """All but the proxy, at once; none of them serves yet."""
        self.start_metadata()
        for role in INSTANCES:
            self.start_instance(role)

    def wait_served(self) -> None:
        """Until all serve and the two agents know each other."""
        for name in ("metadata", *INSTANCES):
            self.wait_ready(self.processes[name])
        self.wait_ready(self.start_proxy())
        self.wait_connected()

    def tree(self, name: str) -> list[psutil.Process]:
        """A process and all its descendants; nothing where it has ended."""
        try:
            first = psutil.Process(self.processes[name].pid)
            return [first, *first.children(recursive=True)]
        except (KeyError, psutil.NoSuchProcess):
            return []

    def agent(self, role: str) -> psutil.Process | None:
        """The transfer agent of an instance; None while it has none."""
        for process in self.tree(role):
            try:
                if "mooncake_v0.transfer.agent" in process.cmdline():
                    return process
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    def _start(self, name: str, command: Sequence[str], ready_url: str, *more: Any) -> ManagedProcess:
        prefix = self.link.enter() if self.link is not None and name == "prefill" else []
        return super()._start(name, [*prefix, *command], ready_url, *more)


def restart(pair: SoakPair, name: str) -> None:
    """What a supervisor does with a process that has died or does not answer: end what is left, start it again."""
    process = pair.processes.pop(name, None)
    if process is not None:
        _end_now(process)
    if name == "metadata":
        pair.start_metadata()
    else:
        pair.start_instance(name)


def _end_now(process: ManagedProcess) -> None:
    if process.popen.poll() is None:
        process.popen.kill()
    process.stop()
