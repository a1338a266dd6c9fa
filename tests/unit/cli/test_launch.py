"""`launch`: the commands it makes, what it refuses, and how it runs, ends and reports real child processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.cli.launch_commands import Instance, flag_value, kv_transfer_config, own_flag_in, short_number
from mooncake_v0.cli.launch_run import notify_systemd, pid_file
from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.vllm_plugin.kv_transfer_config import parse_kv_transfer_config
from tests.servers import answers, free_ports, wait_until

ROOT = Path(__file__).parents[3]
CONFIG = {
    "prefill_url": "127.0.0.1:23003",
    "decode_url": "127.0.0.1:23103",
    "metadata_server": "http://127.0.0.1:1/metadata",
    "protocol": "tcp",
    "device_name": "",
}
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mooncake.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return tmp_path


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_v0", "launch", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


# --- what is started --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("role", "kv_role", "rank"), [("prefill", "kv_producer", 0), ("decode", "kv_consumer", 1)])
def test_the_json_is_what_the_plugin_takes(role: str, kv_role: str, rank: int) -> None:
    parsed = parse_kv_transfer_config(kv_transfer_config(role, 2_000_000_000))  # type: ignore[arg-type]
    assert (parsed.kv_role, parsed.kv_rank, parsed.kv_parallel_size, parsed.kv_buffer_size) == (kv_role, rank, 2, 2e9)


@pytest.mark.parametrize(
    ("number", "text"), [(2_000_000_000, "2e9"), (540_000_000, "540000000"), (4 << 30, "4294967296")]
)
def test_a_round_size_is_written_as_the_documentation_does(number: int, text: str) -> None:
    assert short_number(number) == text
    assert float(text) == number


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--host", "::1"], None),
        (["--tensor_parallel_size=2"], "--tensor-parallel-size"),
        (["--seed", "1", "--port", "3"], "--port"),
    ],
)
def test_flags_that_launch_sets_are_found_among_the_users(words: list[str], found: str | None) -> None:
    assert own_flag_in(words) == found


def test_the_api_is_asked_where_vllm_listens() -> None:
    words = ["--host=10.0.0.7", "--seed", "1"]
    assert flag_value(words, "--host") == "10.0.0.7"
    assert (
        Instance("decode", Path("m.json"), "m", 8200, extra=words).command().ready_url == "http://10.0.0.7:8200/health"
    )
    assert Instance("decode", Path("m.json"), "m", 8200).api_url == "http://127.0.0.1:8200"


def test_print_shows_a_line_for_each_process_that_a_shell_takes(folder: Path) -> None:
    config = {**CONFIG, "metadata_server": "http://127.0.0.1:8080/metadata"}
    (folder / "mooncake.json").write_text(json.dumps(config))
    gpus = ("--prefill-gpus", "0", "--decode-gpus", "1")
    done = launch(folder, "pair", "mooncake.json", "--model", "a model", "--serve-metadata", "--print", *gpus)
    assert done.returncode == 0, done.stderr
    metadata, prefill, decode, proxy = map(shlex.split, done.stdout.splitlines())
    assert metadata[-4:] == ["--host", "127.0.0.1", "--port", "8080"]
    assert prefill[:2] == ["MOONCAKE_CONFIG_PATH=mooncake.json", "CUDA_VISIBLE_DEVICES=0"]
    assert decode[decode.index("--model") + 1] == "a model"
    assert proxy[-4:] == ["--prefill", "http://127.0.0.1:8100", "--decode", "http://127.0.0.1:8200"]


def test_the_automatic_buffer_is_what_size_says(folder: Path) -> None:
    auto = ("--kv-buffer-size", "auto", "--prompt-tokens", "8000", "--concurrency", "4")
    printed = launch(folder, "prefill", "mooncake.json", "--model", "model", "--print", *auto).stdout
    command = [sys.executable, "-m", "mooncake_v0", "size", "--model", "model", "--prompt-tokens", "8000"]
    sized = subprocess.run(
        [*command, "--concurrency", "4", "--format", "json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
    )
    size = json.loads(sized.stdout)["kv_buffer_size"]
    assert json.loads(shlex.split(printed)[-1])["kv_buffer_size"] == size == 1_900_000_000


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("prefill", "nowhere.json", "--model", "m"), 2, "nowhere.json does not exist"),
        (
            ("prefill", "mooncake.json", "--model", "m", "--", "--port", "1"),
            2,
            "--port after -- is set by launch itself",
        ),
        (("prefill", "mooncake.json", "--model", "m", "--serve-metadata"), 2, "--serve-metadata is for pair"),
        (("prefill", "mooncake.json", "--model", "m", "--kv-buffer-size", "big"), 2, "'big' is not a size"),
        (("decode", "mooncake.json", "--model", "m"), 1, "[online-metadata-unreachable]"),
        (("decode", "mooncake.json", "--model", "m", "--print", "--", "--no-such-flag"), 1, "[launch-flag-unknown]"),
        (("prefill", "mooncake.json"), 2, "Missing option '--model'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    folder: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = launch(folder, *arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_secret_that_cannot_be_read_keeps_it_from_starting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_V0_SECRET_FILE", "/nowhere/secret")
    done = launch(folder, "prefill", "mooncake.json", "--model", "m")
    assert done.returncode == 1
    assert "MOONCAKE_V0_SECRET_FILE names a file that cannot be read: No such file" in done.stderr


# --- running ----------------------------------------------------------------------------------------------------------

DRIVER = """
import json, sys
from pathlib import Path
from mooncake_v0.cli import main
from mooncake_v0.cli.launch_commands import Command
from mooncake_v0.cli.launch_run import Runner, Stopped
from mooncake_v0.errors import CouldNotCheckError

def server(name, port):
    code = f"import http.server as h; h.test(h.SimpleHTTPRequestHandler, port={port}, bind='127.0.0.1')"
    return Command(name, (sys.executable, "-c", code), {}, f"http://127.0.0.1:{sys.argv[3] or port}/")

commands = [server(f"server{n}", port) for n, port in enumerate(json.loads(sys.argv[1]))]
try:
    with Runner(lambda command: Path(f"{command.name}.log"), lambda line: print(line, flush=True)) as runner:
        runner.start(commands, float(sys.argv[2]), lambda names, elapsed: None)
        print("ready", [child.pid for child in runner._children], flush=True)
        runner.wait()
except Stopped:
    print("stopped by", runner.signal)
except CouldNotCheckError as error:
    print(error.what)
"""


@contextmanager
def start_driver(
    folder: Path, ports: list[int], timeout_s: float = 30, ready_port: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """ready_port: asked in place of the servers' own ports."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(ports), str(timeout_s), ready_port],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        try:
            yield driver
        finally:
            driver.terminate()  # where a test has failed; it ends its servers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_child(tmp_path: Path, number: signal.Signals) -> None:
    ports = free_ports(2)
    with start_driver(tmp_path, ports) as driver:
        assert driver.stdout is not None
        lines = [driver.stdout.readline() for _ in range(3)]
        assert sorted(line.split()[0] for line in lines) == ["ready", "server0", "server1"]
        driver.send_signal(number)
        assert driver.communicate(timeout=30) == (f"stopped by {int(number)}\n", "")
    assert [port for port in ports if answers(port)] == []


def test_a_child_that_ends_ends_the_rest_and_shows_its_last_lines(tmp_path: Path) -> None:
    ports = free_ports(2)
    with start_driver(tmp_path, ports) as driver:
        assert driver.stdout is not None
        pids = next(line for line in iter(driver.stdout.readline, "") if line.startswith("ready"))
        os.kill(json.loads(pids.removeprefix("ready "))[1], signal.SIGKILL)
        said, _ = driver.communicate(timeout=30)
    assert said.startswith("server1 has ended with signal SIGKILL")
    wait_until(lambda: not answers(ports[0]), "the end of the other server")


def test_a_port_that_is_taken_shows_the_childs_own_message(tmp_path: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        with start_driver(tmp_path, [squatter.getsockname()[1]]) as driver:
            said, _ = driver.communicate(timeout=30)
    assert "server0 has ended with exit code 1" in said
    assert "Address already in use" in said


def test_a_process_that_does_not_serve_in_time_is_named(tmp_path: Path) -> None:
    with start_driver(tmp_path, free_ports(1), timeout_s=0.01, ready_port="1") as driver:
        said, _ = driver.communicate(timeout=30)
    assert said.startswith("server0 does not serve after 0 s")


def test_the_pid_file_is_there_while_we_run_and_keeps_a_second_one_out(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pid_file(path):
        assert path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(CouldNotCheckError, match=f"belongs to process {os.getpid()}"), pid_file(path):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_pid_file_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    path.write_text("999999999\n")
    with pid_file(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_systemd("READY=1")
        notified.settimeout(5)
        assert notified.recv(100) == b"READY=1"
