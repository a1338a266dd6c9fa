"""`mooncake-v0 demo`: a whole pair on this host, two requests through it, and what moved."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Iterator

import click

from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.pin.processes import ManagedProcess, Pair, PairOptions

PROMPT = "San Francisco is a city of hills, fog and bridges. " * 12
QUESTION = "Tell me a story about a mooncake that travels from one machine to another. " * 8


@click.command()
@click.option("--model", metavar="NAME|DIR", help="Model to serve.  [default: a tiny random Qwen2, made on the spot]")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1, 16), help="Tensor parallel size.")
@click.option("--metadata", metavar="URL", help="Use this metadata store (etcd://… or http://…), not our own server.")
@click.option("--keep", is_flag=True, help="Leave everything running and print a curl line; stop it with Ctrl-C.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="For logs and mooncake.json.")
def demo(model: str | None, tp: int, metadata: str | None, keep: bool, folder: Path | None) -> None:
    """Start a prefill instance, a decode instance, metadata server and proxy on free ports of this host, send one
    completion and one chat request through them, show what moved, and stop everything.

    \b
    Examples:
      mooncake-v0 demo
      mooncake-v0 demo --keep
      mooncake-v0 demo --metadata etcd://127.0.0.1:2379 --tp 2
    """
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="mooncake-v0-demo-"))
            stack.push(functools.partial(_remove_unless_failed, folder))
        pair = Pair(_options(model, tp, metadata, folder))
        stack.callback(_stop, pair)
        with _progress() as show:
            pair.start_all(show)
            pair.wait_connected()
        _show_processes(pair)
        served = _served_model(pair)
        _show_answer("completion", _complete(pair, served))
        _show_answer("chat", _chat(pair, served))
        _show_transfer(pair, tp)
        if keep:
            _keep_running(pair, served)


def _options(model: str | None, tp: int, metadata: str | None, folder: Path) -> PairOptions:
    from mooncake_v0.pin.environment import cache_folder, has_gpu
    from mooncake_v0.pin.tiny_model import CPU_DTYPE, make_tiny_model

    try:
        import importlib.metadata

        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        from mooncake_v0.doctor.software import install_command

        raise CouldNotCheckError(
            "vLLM is not installed in this environment",
            fix=f"run scripts/demo.sh of the checkout, or: {install_command()}",
        ) from None
    # through the engine, as between two hosts
    transport = os.environ.get("MOONCAKE_V0_TRANSPORT", "engine")
    environment = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "MOONCAKE_V0_TRANSPORT": transport,
    }
    args = ["--max-model-len", "4096", "--disable-log-requests"]
    if not has_gpu():
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        args += ["--dtype", "bfloat16" if model else CPU_DTYPE]
    else:
        args += ["--num-gpu-blocks-override", "4000"]  # both share one GPU, and vLLM counts the other as its own
    if model is None:
        click.echo("making a tiny model", err=True)
        model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    return PairOptions(model, folder, tp=tp, metadata_url=metadata, vllm_args=args, environment=environment)


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """A spinner with the name of what is being waited for; plain lines where there is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    started = time.monotonic()
    seen: set[str] = set()
    with console.status("starting", spinner="dots") as status:

        def show(process: ManagedProcess) -> None:
            status.update(f"waiting for {process.name}, {time.monotonic() - started:.0f} s")
            if not console.is_terminal and process.name not in seen:
                seen.add(process.name)
                console.print(f"waiting for {process.name}")

        yield show


def _show_processes(pair: Pair) -> None:
    for name, process in pair.processes.items():
        address = process.ready_url.rsplit("/", 1)[0]
        click.echo(f"{name:<9} pid {process.pid:<8} {address}")


@dataclass(frozen=True)
class Answer:
    text: str
    ttft_ms: float


def _served_model(pair: Pair) -> str:
    with urllib.request.urlopen(f"{pair.proxy_url}/v1/models", timeout=30) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


def _complete(pair: Pair, model: str) -> Answer:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "stream": True}
    return _stream(f"{pair.proxy_url}/v1/completions", body, lambda choice: choice["text"])


def _chat(pair: Pair, model: str) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 32, "stream": True}
    return _stream(f"{pair.proxy_url}/v1/chat/completions", body, lambda choice: choice["delta"].get("content") or "")


def _stream(url: str, body: dict[str, Any], text_of: Any) -> Answer:
    """Send a streaming request; time to the first token is measured at the client, through the proxy."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    started = time.monotonic()
    first_s, parts = 0.0, []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise CouldNotCheckError(f"the pair answered {chunk['error']}", fix="see decode.log")
            text = text_of(chunk["choices"][0]) if chunk.get("choices") else ""
            if text and not first_s:
                first_s = time.monotonic() - started
            parts.append(text)
    return Answer("".join(parts), first_s * 1000)


def _show_answer(what: str, answer: Answer) -> None:
    click.echo(f"{what:<9} TTFT {answer.ttft_ms:.0f} ms  {answer.text!r}")


def _show_transfer(pair: Pair, tp: int) -> None:
    """What moved, by decode's own counters; exit code 1 when decode had to compute a prompt."""
    counters: dict[str, float] = {}
    for rank in range(tp):
        for name, value in pair.agent_status("decode", rank).counters.items():
            counters[name] = counters.get(name, 0.0) + value
    moved, seconds = counters.get("read_bytes", 0.0), counters.get("read_us", 0.0) / 1e6
    hits = counters.get("hits", 0.0) / tp
    misses = sum(value for name, value in counters.items() if name.startswith("miss_")) / tp
    rate = f"{moved / seconds / 1e9:.2f} GB/s" if seconds else "no read"
    click.echo(f"moved     {moved:,.0f} bytes of KV in {counters.get('reads', 0):.0f} reads, {rate}")
    click.echo(
        f"decode    skipped the prefill of {hits:.0f} of {hits + misses:.0f} prompts "
        f"({counters.get('hit_tokens', 0.0) / tp:.0f} tokens it did not compute)"
    )
    if misses or not hits:
        raise click.ClickException("decode computed a prompt itself; see decode.log")


def _keep_running(pair: Pair, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "San Francisco is a", "max_tokens": 16})
    click.echo("running until Ctrl-C; ask it with")
    click.echo(f"  curl -s {pair.proxy_url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    while all(process.popen.poll() is None for process in pair.processes.values()):
        time.sleep(0.5)
    raise click.ClickException("a process of the pair has ended")


def _remove_unless_failed(folder: Path, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
    """After a failure the logs are what the user needs."""
    if kind is None or issubclass(kind, (KeyboardInterrupt, SystemExit)):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        click.echo(f"logs are in {folder}", err=True)


def _stop(pair: Pair) -> None:
    click.echo("stopping", err=True)
    pair.stop_all()


def _interrupt(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
