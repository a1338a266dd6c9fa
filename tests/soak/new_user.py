"""As a new user: from the README alone to a pair on two hosts, then to two pairs behind a proxy that discovers them.

    python -m tests.soak.new_user

The two hosts are network namespaces with a cable between them and the documented addresses, so that the commands of
README's "Start a pair" and of the operating guide's "Two pairs" are typed as they are; only the model is a tiny one, with
sizes to match. Every transcript of "A running pair" and "Two pairs" is compared with what the commands print, numbers and
widths aside; decode must have skipped every prefill, on both pairs. Needs root, the pinned environment and 8 GiB of free
memory. Prints one line a step; exit code 1 if one fails. Takes about five minutes on two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Sequence

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.tiny_model import make_tiny_model
from tests.documents import ROOT, Transcript, blocks, commands, first_json, matches, normalised, transcripts
from tests.two_hosts import inside, two_hosts

README, OPERATING = ROOT / "README.md", ROOT / "docs" / "operating.md"
PREFILL, DECODE = "192.168.0.137", "192.168.0.139"
MODELS = ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",)
ETCD = f"http://{DECODE}:2379"
START_S = 600.0


@dataclass
class User:
    """Types commands on both hosts, in a folder with the README's mooncake.json."""

    hosts: dict[str, str]
    folder: Path
    model: str
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def adapt(self, command: str) -> str:
        """The command with the tiny model and sizes that fit it."""
        for written, here in (
            (MODELS[0], self.model),
            ("10000", "4096 --dtype float32"),
            ("2e9", "2e8"),
            ("1000", "16"),
        ):
            command = command.replace(written, here)
        # launch takes vLLM's own flags after --
        if "mooncake-v0 launch" in command:
            command += " --kv-buffer-size 2e8 -- --max-model-len 4096 --dtype float32"
        return command

    def _environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "NO_COLOR": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}

    def start(self, side: str, command: str) -> None:
        with (self.folder / f"{len(self.running)}.log").open("wb") as log:
            words = [*inside(self.hosts[side]), "bash", "-c", self.adapt(command)]
            process = subprocess.Popen(
                words, cwd=self.folder, env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )
        self.running.append(process)

    def ask(self, side: str, command: str) -> str:
        words = [*inside(self.hosts[side]), "bash", "-c", self.adapt(command)]
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        return done.stdout.decode()

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Poll until it is so. Raises AssertionError with the ends of the logs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{log.name}: {log.read_text()[-600:]}" for log in sorted(self.folder.glob("*.log")))
                raise AssertionError(f"no {what} within {timeout_s:.0f} s\n{logs}")
            time.sleep(1)

    def see(self, transcript: Transcript) -> None:
        """The command prints what the document shows, numbers and widths aside; counters may come a moment later."""
        shown = tuple(map(normalised, transcript.output))

        def prints() -> bool:
            printed = self.ask("decode", transcript.command).rstrip("\n").splitlines()
            return matches(shown, list(map(normalised, printed)))

        self.wait(f"output of {transcript.command!r} as shown", prints)

    def wait_for_proxy(self, instances: int) -> None:
        """Until the proxy knows so many instances to be up; until then it has decode serve alone."""
        count = "curl -s http://localhost:8000/metrics | grep -c 'instance_state.*state=\"up\"} 1'"
        self.wait(f"{instances} instances at the proxy", lambda: self.ask("decode", count).strip() == str(instances))

    def stop(self) -> None:
        """End everything that was started, newest first, each with all its processes."""
        for process in reversed(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        for name in self.hosts.values():
            self._end_what_is_left(name, deadline)
        self.running.clear()

    def _end_what_is_left(self, namespace: str, deadline: float) -> None:
        """Wait for what the servers started themselves; an agent ends a little after its vLLM."""
        while pids := subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split():
            if time.monotonic() > deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.5)


def of_section(path: Path, heading: str) -> list[str]:
    found = [block for block in blocks(path) if block.heading == heading and block.language == "bash"]
    return [command for block in found for command in commands(block)]


def shown(heading: str) -> list[Transcript]:
    return [item for item in transcripts(OPERATING) if item.block.heading == heading]


def one_pair(user: User) -> str:
    metadata, prefill, decode, proxy, curl, status = of_section(README, "Start a pair")
    user.start("decode", metadata)
    user.start("prefill", prefill)
    user.start("decode", decode)
    user.start("decode", proxy)
    user.wait("connected pair", lambda: "the pair is connected" in user.ask("decode", status))
    user.wait_for_proxy(2)
    answer = user.ask("decode", curl)
    assert '"finish_reason"' in answer, answer
    for transcript in shown("A running pair"):
        user.see(transcript)
    printed = user.ask("prefill", "mooncake-v0 doctor mooncake.json")
    assert "\n0 errors, " in printed, printed
    return f"answered, and {len(shown('A running pair'))} transcripts are as shown"


def two_pairs(user: User) -> str:
    first = json.loads((user.folder / "mooncake.json").read_text())
    first["metadata_server"] = f"etcd://{DECODE}:2379"
    (user.folder / "a.json").write_text(json.dumps(first))
    (user.folder / "b.json").write_text(json.dumps(first).replace(":13003", ":13103"))
    user.start("decode", f"etcd --data-dir etcd --listen-client-urls {ETCD} --advertise-client-urls {ETCD}")
    for command in of_section(OPERATING, "Two pairs"):
        user.start("prefill" if "launch prefill" in command else "decode", command)
    for transcript in shown("Two pairs"):
        user.see(transcript)
    user.wait_for_proxy(4)
    curl = of_section(README, "Start a pair")[4]
    for number in range(8):
        answer = user.ask("decode", curl.replace("San Francisco", f"Town number {number}"))
        assert '"finish_reason"' in answer, answer
    for name in ("a.json", "b.json"):
        agents = json.loads(user.ask("decode", f"mooncake-v0 status {name} --format json"))["agents"]
        decode = agents[1]
        assert decode["hit_rate"] == 1.0 and decode["counters"]["hits"] >= 2, decode
    return "8 prompts went to both pairs, and neither decode computed one"


@contextlib.contextmanager
def new_user(folder: Path) -> Iterator[User]:
    with two_hosts({"prefill": PREFILL, "decode": DECODE}) as hosts:
        (folder / "mooncake.json").write_text(first_json(README))
        (folder / "bin").mkdir()
        for name, module in (("mooncake-v0", "-m mooncake_v0 "), ("python3", "")):
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
            (folder / "bin" / name).chmod(0o755)
        user = User(hosts, folder, str(make_tiny_model(cache_folder() / "tiny-qwen2")))
        try:
            yield user
        finally:
            user.stop()


STEPS: Sequence[tuple[str, Callable[[User], str]]] = (("one pair", one_pair), ("two pairs", two_pairs))


def main() -> int:
    if os.geteuid():
        print("error: network namespaces need root\n  fix: run it with sudo", file=sys.stderr)
        return 2
    for name, step in STEPS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mooncake-v0-user-") as folder, new_user(Path(folder)) as user:
            try:
                print(f"ok     {name:<10} {step(user)}, {time.monotonic() - started:.0f} s", flush=True)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(f"FAILED {name:<10} {error}", flush=True)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
