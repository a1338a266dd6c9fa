"""From a model's KV size to numbers to set: kv_buffer_size, what it costs, and whether the prompt fits at all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mooncake_v0.config.model_size import ModelSize

# vLLM's default; engine/arg_utils.py of 0.6.4.post1
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
# activations, CUDA graphs and fragments beside weights and cache; a guess that leaves room
RESERVE_BYTES = 2 << 30


@dataclass(frozen=True)
class Advice:
    """All sizes in bytes and for one rank, unless the name says otherwise."""

    token_bytes: int
    prompt_bytes: int
    kv_buffer_size: int
    prompt_tokens: int
    concurrency: int
    tensor_parallel_size: int
    host_memory_bytes_per_side: int
    weights_bytes: int | None
    kv_cache_bytes: int | None
    kv_cache_tokens: int | None
    problems: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(
    size: ModelSize,
    *,
    prompt_tokens: int,
    concurrency: int,
    tensor_parallel_size: int,
    gpu_memory_bytes: int | None,
    gpu_memory_utilization: float,
    weights_bytes: int | None,
) -> Advice:
    """What to set for `concurrency` prompts of `prompt_tokens` in flight; problems are reasons why it cannot work.

    The lookup buffer is host memory, once on each side for each rank. gpu_memory_bytes: of one GPU; None means that
    the paged KV cache is not judged.
    """
    prompt = size.prompt_bytes(prompt_tokens, tensor_parallel_size)
    buffer = _rounded_up(prompt * concurrency)
    cache = tokens = None
    if gpu_memory_bytes is not None and weights_bytes is not None:
        used = weights_bytes // tensor_parallel_size + RESERVE_BYTES
        cache = max(0, int(gpu_memory_bytes * gpu_memory_utilization) - used)
        tokens = cache // size.token_bytes(tensor_parallel_size)
    return Advice(
        token_bytes=size.token_bytes(tensor_parallel_size),
        prompt_bytes=prompt,
        kv_buffer_size=buffer,
        prompt_tokens=prompt_tokens,
        concurrency=concurrency,
        tensor_parallel_size=tensor_parallel_size,
        host_memory_bytes_per_side=buffer * tensor_parallel_size,
        weights_bytes=weights_bytes,
        kv_cache_bytes=cache,
        kv_cache_tokens=tokens,
        problems=tuple(_problems(size, prompt_tokens, tokens, tensor_parallel_size, gpu_memory_utilization)),
    )


def _problems(
    size: ModelSize, prompt_tokens: int, cache_tokens: int | None, tensor_parallel_size: int, utilization: float
) -> list[str]:
    problems = []
    longest = size.max_position_tokens
    if longest is not None and prompt_tokens >= longest:
        problems.append(
            f"the model ends at {longest} tokens, so a prompt of {prompt_tokens} leaves no room for an answer"
        )
    if cache_tokens is not None and prompt_tokens > cache_tokens:
        problems.append(
            f"the GPU's KV cache holds about {cache_tokens} tokens at --gpu-memory-utilization {utilization}, "
            f"so a prompt of {prompt_tokens} does not fit"
        )
    if tensor_parallel_size > 1 and size.kv_heads % tensor_parallel_size and tensor_parallel_size % size.kv_heads:
        problems.append(f"{size.kv_heads} KV heads cannot be divided among {tensor_parallel_size} ranks")
    return problems


def _rounded_up(size: int) -> int:
    """Two leading digits, rounded up: 1,234,567 gives 1,300,000. People copy this number by hand."""
    step = int("1" + "0" * max(0, len(str(size)) - 2))
    return -(-size // step) * step


def weights_bytes(model: str | Path) -> int | None:
    """Bytes of the weight files in a model's folder; None without any."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"):
        files = list(folder.glob(pattern))
        if files:
            return sum(file.stat().st_size for file in files if file.exists())
    return None
