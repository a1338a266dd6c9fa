"""`mooncake-v0 bench transfer`: the rate of the handoff beside its limits and beside upstream's pipe."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mooncake_v0.cli.bench_files import (
    Numbers,
    check_plotting,
    check_torch,
    check_writable,
    end_on_sigterm,
    progress_bar,
    write_json,
)
from mooncake_v0.errors import CouldNotCheckError

if TYPE_CHECKING:
    from mooncake_v0.bench.shapes import KVShape
    from mooncake_v0.bench.transfer_report import Report, Row

HELP = """Measure how fast KV caches move from a producer to a consumer.

Both run as processes on this host, as beside two vLLM instances: blocks are
gathered from a paged KV cache into the pool, moved by the transfer agents, and
scattered into the other side's cache. The limits are measured in the same
rounds: one read by the raw engine, and one contiguous memory copy.

\b
Examples:
  mooncake-v0 bench transfer
  mooncake-v0 bench transfer --model qwen2.5-7b --prompt-tokens 1024,8192
  mooncake-v0 bench transfer --model ./Qwen3-8B --transport engine \\
      --json transfer.json --png transfer.png
  mooncake-v0 bench transfer --peer-python /opt/vllm-0.6.5/bin/python
"""
TRANSPORTS = ("auto", "engine", "shm", "cuda_ipc")  # transfer.agent_settings.TRANSPORTS, without importing it


@click.command(help=HELP)
@click.option(
    "--model",
    default="qwen3-8b",
    show_default=True,
    metavar="NAME|DIR|config.json",
    help="Shape of the KV cache: tiny, qwen2.5-0.5b, qwen2.5-7b, qwen2.5-72b, llama-3.1-8b, llama-3.1-70b, qwen3-8b, "
    "or a model's folder or config.json.",
)
@click.option(
    "--prompt-tokens",
    type=Numbers(int, 10_000_000),
    help="Prompt lengths.  [default: 128 to 32768 in powers of 2, as far as memory allows]",
)
@click.option("--kv-bytes", metavar="SIZE,SIZE,…", help="Sizes instead of prompt lengths, such as 64MiB,1GiB.")
@click.option(
    "--transport",
    "transport_names",
    type=click.Choice(TRANSPORTS),
    multiple=True,
    default=("auto",),
    show_default=True,
    help="May be given several times: one sweep for each.",
)
@click.option(
    "--checksum",
    type=click.Choice(("auto", "on", "off")),
    default="auto",
    show_default=True,
    help="A checksum for each entry that the engine moves; auto: with four cores or more.",
)
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True, help="Medians of so many.")
@click.option("--device", default="auto", show_default=True, metavar="cpu|cuda|cuda:N", help="Where the KV caches are.")
@click.option(
    "--peer-python", metavar="PATH", help="Python of an environment with vllm 0.6.5: times its own pipe as well."
)
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report to this file too.")
@click.option("--png", "png_path", type=click.Path(path_type=Path), help="Write a chart to this file.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Keep the processes' logs here.")
def transfer(
    model: str,
    prompt_tokens: tuple[int, ...] | None,
    kv_bytes: str | None,
    transport_names: tuple[str, ...],
    checksum: str,
    rounds: int,
    device: str,
    peer_python: str | None,
    output: str,
    json_path: Path | None,
    png_path: Path | None,
    folder: Path | None,
) -> None:
    check_torch()
    check_plotting(png_path is not None)
    for path in (json_path, png_path):
        check_writable(path)

    from mooncake_v0.bench.shapes import find_shape
    from mooncake_v0.bench.transfer import PORTS, TransferOptions, measure
    from mooncake_v0.bench.upstream import find_python
    from mooncake_v0.pin.processes import find_free_range
    from mooncake_v0.transfer.engine import check_engine_version

    check_engine_version()
    if peer_python is not None:
        find_python(peer_python)
    shape = find_shape(model)
    device = _device(device)
    if "cuda_ipc" in transport_names and device == "cpu":
        raise CouldNotCheckError(
            "--transport cuda_ipc moves KV in GPU memory, and the caches are on the CPU",
            fix="give --device cuda on a host with an NVIDIA GPU, or another transport",
        )
    blocks = _lengths(shape, prompt_tokens, kv_bytes, device)
    end_on_sigterm()
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-v0-bench-")))
        folder.mkdir(parents=True, exist_ok=True)
        options = TransferOptions(
            shape,
            blocks,
            tuple(dict.fromkeys(transport_names)),
            find_free_range(PORTS),
            folder,
            rounds=rounds,
            checksum=checksum,
            device=device,
            peer_python=peer_python,
        )
        with progress_bar() as show:
            report = measure(options, show)
    write_json(json_path, report.as_dict())
    if png_path is not None:
        from mooncake_v0.bench.plot import draw_transfer

        draw_transfer(report, png_path)
    click.echo(json.dumps(report.as_dict(), indent=2) if output == "json" else _text(report))


def _device(name: str) -> str:
    """cpu, or the GPU that was asked for or found."""
    from mooncake_v0.pin.environment import has_gpu

    if name == "auto":
        return "cuda:0" if has_gpu() else "cpu"
    if name != "cpu" and not (name == "cuda" or (name.startswith("cuda:") and name[5:].isdigit())):
        raise click.UsageError(f"--device {name!r} is neither cpu nor cuda nor cuda:N")
    if name != "cpu" and not has_gpu():
        raise CouldNotCheckError(f"--device {name}: this host has no NVIDIA GPU", fix="use --device cpu")
    return name


def _lengths(shape: KVShape, prompt_tokens: tuple[int, ...] | None, kv_bytes: str | None, device: str) -> list[int]:
    """Prompt lengths in blocks. One that was asked for must fit; of the default ones some may be left out, with a word."""
    from mooncake_v0.bench.transfer import DEFAULT_PROMPT_TOKENS, available_bytes, lengths_that_fit

    if prompt_tokens and kv_bytes:
        raise click.UsageError("give --prompt-tokens or --kv-bytes, not both")
    if kv_bytes:
        wanted = sorted({-(-size // shape.block_bytes) for size in _sizes(kv_bytes)})
    else:
        wanted = sorted({shape.blocks(tokens) for tokens in prompt_tokens or DEFAULT_PROMPT_TOKENS})
    fitting = lengths_that_fit(shape, wanted, device)
    missing = [count for count in wanted if count not in fitting]
    if not missing:
        return fitting
    what = ", ".join(f"{count * 16:,} tokens ({count * shape.block_bytes / 2**30:.2f} GiB)" for count in missing)
    fact = f"{what} do not fit four times into the {available_bytes() / 2**30:.1f} GiB of free memory"
    if prompt_tokens or kv_bytes or not fitting:
        raise CouldNotCheckError(fact, fix="give shorter prompts, a smaller model, or a host with more memory")
    click.echo(f"left out: {fact}", err=True)
    return fitting


def _sizes(text: str) -> list[int]:
    from mooncake_v0.config.kv_transfer import parse_size_bytes

    sizes = []
    for part in text.split(","):
        nbytes = parse_size_bytes(part.strip())
        if not nbytes or nbytes > 1 << 40:
            raise click.UsageError(f"--kv-bytes {part.strip()!r} is not a size up to 1TiB; write 64MiB, 1GiB or bytes")
        sizes.append(int(nbytes))
    return sizes


def _text(report: Report) -> str:
    run = report.run
    lines = [
        f"{run['model_shape']}: {run['token_bytes']:,} bytes of KV a token, {run['device']}, {run['cpus']} CPUs, "
        f"medians of {run['rounds']} rounds",
        f"raw engine {report.limits.engine_gb_per_s:.2f} GB/s, memcpy {report.limits.memcpy_gb_per_s:.2f} GB/s at best",
        "",
        "transfer: from the commit on prefill until the bytes are decode's",
        *_table(report.rows),
        "",
        "cache to cache: the same with gather and scatter",
        *_table(report.cache_to_cache),
    ]
    return "\n".join(lines + ["", *report.notes] if report.notes else lines)


def _table(rows: tuple[Row, ...]) -> list[str]:
    lines = [
        "  prompt    KV size  transport transfer ms   GB/s  of engine  of memcpy  upstream",
    ]
    for row in rows:
        upstream = f"{row.vs_upstream:.1f}x" if row.vs_upstream is not None else "-"
        lines.append(
            f"{row.prompt_tokens:>8,} {_size(row.kv_bytes):>10}  {row.transport:<8} {row.transfer_ms:>11,.2f} "
            f"{row.gb_per_s:>6.2f} {row.share_of_engine:>10.1%} {row.share_of_memcpy:>10.1%} {upstream:>9}"
        )
    return lines


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
