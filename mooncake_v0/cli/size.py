"""`mooncake-v0 size`: the kv_buffer_size for a model and its prompts, what it costs, and whether a prompt fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mooncake_v0.config.model_size import ModelSize
    from mooncake_v0.config.size_advice import Advice

HELP = """Compute kv_buffer_size for a model and the prompts in flight.

The lookup buffer keeps the KV cache of a prompt from its prefill until
decode has it. It is host memory, on each side, for each rank. Exit code 1 if
the prompt cannot fit.

\b
Examples:
  mooncake-v0 size --model ./Qwen2.5-7B-Instruct --prompt-tokens 8000
  mooncake-v0 size --model config.json --prompt-tokens 8000 \\
      --concurrency 16 --tp 4
  mooncake-v0 size --model ./Qwen2.5-7B-Instruct --prompt-tokens 30000 \\
      --gpu-memory 24GiB --gpu-memory-utilization 0.8
"""


@click.command(help=HELP)
@click.option("--model", required=True, metavar="DIR|config.json", help="The model's folder or its config.json.")
@click.option(
    "--prompt-tokens", required=True, type=click.IntRange(1, 10_000_000), metavar="N", help="The longest prompt."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    metavar="M",
    help="Prompts in flight.",
)
@click.option(
    "--tp", "ranks", type=click.IntRange(1, 16), default=1, show_default=True, metavar="T", help="Tensor parallel size."
)
@click.option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, such as 24GiB; then its KV cache is judged too.")
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0.01, 1.0),
    default=0.9,
    show_default=True,
    metavar="U",
    help="As given to vLLM.",
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]), default="auto", show_default=True
)
@click.option("--dtype", help="As given to vLLM, if not auto.")
@click.option(
    "--block-size",
    type=click.Choice(["8", "16", "32", "64", "128"]),
    default="16",
    show_default=True,
    help="Tokens of a block.",
)
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def size(
    model: str,
    prompt_tokens: int,
    concurrency: int,
    ranks: int,
    gpu_memory: str | None,
    gpu_memory_utilization: float,
    kv_cache_dtype: str,
    dtype: str | None,
    block_size: str,
    output: str,
) -> int:
    from mooncake_v0.config.kv_transfer import parse_size_bytes
    from mooncake_v0.config.model_size import read_model_size
    from mooncake_v0.config.size_advice import advise, weights_bytes

    gpu_memory_bytes = parse_size_bytes(gpu_memory) if gpu_memory is not None else None
    if gpu_memory is not None and not gpu_memory_bytes:
        raise click.UsageError(f"--gpu-memory {gpu_memory!r} is not a size; write 24GiB, 80GB or bytes")
    kv = read_model_size(model, kv_cache_dtype=kv_cache_dtype, dtype=dtype, block_tokens=int(block_size))
    weights = weights_bytes(model)
    if gpu_memory_bytes is not None and weights is None:
        raise click.UsageError(
            "--gpu-memory needs the model's folder with its weights as --model, to know what is left"
        )
    advice = advise(
        kv,
        prompt_tokens=prompt_tokens,
        concurrency=concurrency,
        tensor_parallel_size=ranks,
        gpu_memory_bytes=gpu_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        weights_bytes=weights,
    )
    click.echo(json.dumps(advice.as_dict(), indent=2) if output == "json" else _text(kv, advice))
    return 1 if advice.problems else 0


def _text(kv: ModelSize, advice: Advice) -> str:
    per = "" if advice.tensor_parallel_size == 1 else " on each rank"
    lines = [
        f"KV cache of one token:     {_bytes(advice.token_bytes)}{per}",
        f"                           ({kv.layers} layers, {kv.kv_heads} KV heads of {kv.head_size}, {kv.dtype})",
        f"KV cache of one prompt:    {_bytes(advice.prompt_bytes)}{per} ({advice.prompt_tokens} tokens)",
        f"set kv_buffer_size to:     {advice.kv_buffer_size:.2g}{per} ({advice.concurrency} in flight)",
        f"host memory of each side:  {_bytes(advice.host_memory_bytes_per_side)}",
    ]
    if advice.kv_cache_bytes is not None:
        lines.append(
            f"GPU memory left for KV:    about {_bytes(advice.kv_cache_bytes)}{per}, {advice.kv_cache_tokens} tokens"
        )
    lines += [f"does not fit: {problem}" for problem in advice.problems]
    return "\n".join(lines)


def _bytes(number: int) -> str:
    """Bytes for people, with the exact number: 1.13 GiB (1,208,025,088 bytes)."""
    value, unit = float(number), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    exact = f"{number:,} bytes"
    return exact if unit == "bytes" else f"{value:.2f} {unit} ({exact})"
