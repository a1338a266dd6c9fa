"""The servers of `mooncake-v0 bench serve`: started on this host, or asked what they received."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

import click

from mooncake_v0.cli.bench_files import progress_bar
from mooncake_v0.errors import CouldNotCheckError

if TYPE_CHECKING:
    from mooncake_v0.bench.serve import ServeOptions
    from mooncake_v0.pin.processes import Pair, PairOptions

_PROMPTS_IN_BUFFER = 8
_BUFFER_BYTES = 4_000_000_000  # for a model that vLLM has yet to download

Status = Callable[[], "dict[str, float] | None"]  # decode's counters


@dataclass(frozen=True)
class StartOptions:
    """What to start: a pair and a plain instance."""

    model: str
    tp: int
    kv_buffer_size: str | None
    vllm_args: Sequence[str] = field(default_factory=tuple)
    folder: Path | None = None
    prefill_gpus: str | None = None
    decode_gpus: str | None = None


@contextlib.contextmanager
def started(start: StartOptions, options: ServeOptions) -> Iterator[tuple[ServeOptions, Status]]:
    """A pair, its proxy and a plain instance on free ports of this host; stopped at the end."""
    from mooncake_v0.pin.processes import Pair, find_free_port

    with contextlib.ExitStack() as stack:
        folder = start.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-v0-bench-")))
        pair = Pair(_pair_options(start, options, folder))
        stack.callback(pair.stop_all)
        port = find_free_port()
        with progress_bar() as show:
            pair.start_all(lambda process: show(f"waiting for {process.name}", 0, 1))
            pair.wait_ready(pair.start_plain(port), lambda process: show(f"waiting for {process.name}", 0, 1))
            pair.wait_connected()
        yield (
            replace(options, proxy_url=pair.proxy_url, plain_url=f"http://127.0.0.1:{port}"),
            lambda: _pair_counters(pair, start.tp),
        )


def _pair_options(start: StartOptions, options: ServeOptions, folder: Path) -> PairOptions:
    import importlib.util

    from mooncake_v0.bench.serve import DEFAULT_PROMPT_TOKENS
    from mooncake_v0.pin.environment import cache_folder, has_gpu
    from mooncake_v0.pin.processes import PairOptions
    from mooncake_v0.pin.tiny_model import CPU_DTYPE, make_tiny_model

    if importlib.util.find_spec("vllm") is None:
        raise CouldNotCheckError(
            "vLLM is not installed in this environment", fix="run it there, or give --proxy and --plain"
        )
    model = str(make_tiny_model(cache_folder() / "tiny-qwen2")) if start.model == "tiny" else start.model
    longest = max(*(options.prompt_tokens or DEFAULT_PROMPT_TOKENS), options.rate_prompt_tokens) + options.output_tokens
    arguments = ["--disable-log-requests"]
    environment = {}
    if start.model == "tiny":
        arguments += ["--max-model-len", str(min(32768, longest))]
    if has_gpu():
        arguments += ["--gpu-memory-utilization", "0.3"]
    else:
        arguments += ["--dtype", CPU_DTYPE if start.model == "tiny" else "bfloat16"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return PairOptions(
        model,
        folder,
        tp=start.tp,
        kv_buffer_size=_buffer_bytes(start.kv_buffer_size, model, longest),
        vllm_args=[*arguments, *start.vllm_args],
        environment=environment,
        gpus={name: gpus for name, gpus in _gpus(start) if gpus is not None},
    )


def _gpus(start: StartOptions) -> Iterator[tuple[str, str | None]]:
    """The plain instance is compared with decode, and so gets the same."""
    yield "prefill", start.prefill_gpus
    yield "decode", start.decode_gpus
    yield "plain", start.decode_gpus


def _buffer_bytes(text: str | None, model: str, longest_tokens: int) -> int:
    """The size asked for, or 8 of the longest prompts where the model's config.json is at hand."""
    from mooncake_v0.bench.shapes import find_shape
    from mooncake_v0.config.kv_transfer import parse_size_bytes

    if text is None:
        try:
            shape = find_shape(model)
        except CouldNotCheckError:
            return _BUFFER_BYTES
        return _PROMPTS_IN_BUFFER * shape.entry_bytes(shape.blocks(longest_tokens) + 1)
    nbytes = parse_size_bytes(text)
    if not nbytes:
        raise click.UsageError(f"--kv-buffer-size {text!r} is not a size; write 2e9, 4GiB or bytes")
    return nbytes


def _pair_counters(pair: Pair, tp: int) -> dict[str, float]:
    """Decode's counters over its ranks."""
    counters: dict[str, float] = {}
    for rank in range(tp):
        for name, value in pair.agent_status("decode", rank).counters.items():
            counters[name] = counters.get(name, 0.0) + value
    return counters


def status_reader(config_path: Path | None) -> Status:
    """The counters of a running decode's rank 0; None without its mooncake.json."""
    if config_path is None:
        return lambda: None

    from mooncake_v0.config.load import load_config
    from mooncake_v0.transfer.status import query_status

    ports = load_config(config_path).ports("decode", 0)
    return lambda: dict(query_status(ports.host, ports.side_channel).counters)
