"""`mooncake-v0 size`: the arithmetic against published figures and against the pin, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mooncake_v0.cli.size import size
from mooncake_v0.config.model_size import model_size, read_model_size
from mooncake_v0.config.size_advice import advise
from mooncake_v0.errors import CouldNotCheckError

# the numbers of the models' published config.json files
QWEN25_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
QWEN3_8B = {
    **QWEN25_7B,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
}
MISTRAL_NEMO = {
    **QWEN25_7B,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 5120,
    "head_dim": 128,
}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
FALCON_7B = {
    "model_type": "falcon",
    "multi_query": True,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_size": 4544,
}
FALCON_40B = {
    **{"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8},
    **{"num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192},
}
DBRX = {"model_type": "dbrx", "attn_config": {"kv_n_heads": 8}, "n_layers": 40, "n_heads": 48, "d_model": 6144}
LLAVA = {"model_type": "llava", "text_config": QWEN25_7B}
DEEPSEEK_V2 = {
    **QWEN25_7B,
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
}


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (QWEN25_7B, 2 * 28 * 4 * 128 * 2),
        (QWEN3_8B, 2 * 36 * 8 * 128 * 2),
        (MISTRAL_NEMO, 2 * 40 * 8 * 128 * 2),
        (GPT2, 2 * 12 * 12 * 64 * 2),
        (FALCON_7B, 2 * 32 * 1 * 64 * 2),
        (FALCON_40B, 2 * 60 * 8 * 64 * 2),
        (DBRX, 2 * 40 * 8 * 128 * 2),
        (LLAVA, 2 * 28 * 4 * 128 * 2),
        (DEEPSEEK_V2, 2 * 27 * 16 * 256 * 2),
    ],
    ids=[
        "qwen2.5-7b",
        "qwen3-8b",
        "mistral-nemo",
        "gpt2",
        "falcon-7b",
        "falcon-40b",
        "dbrx",
        "llava",
        "deepseek-v2-lite",
    ],
)
def test_bytes_of_a_token(config: dict[str, Any], token_bytes: int) -> None:
    assert model_size(config, "config.json").token_bytes() == token_bytes


@pytest.mark.parametrize(("tokens", "published_mib"), [(1024, 144), (4096, 576), (32768, 4608)])
def test_qwen3_8b_agrees_with_the_published_table_of_transfers(tokens: int, published_mib: int) -> None:
    """The Mooncake project published 146 MB, 578 MB and 4.50 GB for these prompts (1,024, 4,096 and 32,768 tokens)."""
    assert model_size(QWEN3_8B, "x").prompt_bytes(tokens) == pytest.approx(published_mib << 20, rel=0.001)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_rank_has_its_share_of_the_heads_and_at_least_one(ranks: int, heads: int) -> None:
    assert model_size(QWEN25_7B, "x").token_bytes(ranks) == 2 * 28 * heads * 128 * 2


def test_a_prompt_takes_whole_blocks_and_one_hidden_row() -> None:
    kv = model_size(QWEN25_7B, "x")

    assert kv.prompt_bytes(1) == kv.prompt_bytes(16) == 16 * kv.token_bytes() + 3584 * 2
    assert kv.prompt_bytes(17) == 32 * kv.token_bytes() + 3584 * 2


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "element_bytes"),
    [(None, None, 2), ("float32", None, 4), ("half", "auto", 2), (None, "fp8", 1), (None, "fp8_e5m2", 1)],
)
def test_type_of_the_cache_follows_the_flags(dtype: str | None, kv_cache_dtype: str | None, element_bytes: int) -> None:
    assert model_size(QWEN25_7B, "x", dtype=dtype, kv_cache_dtype=kv_cache_dtype).element_bytes == element_bytes


def test_float32_checkpoints_run_as_float16() -> None:
    assert model_size({**QWEN25_7B, "torch_dtype": "float32"}, "x").dtype == "float16"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "is not JSON"),
        (b"[]", "does not hold an object"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "has no num_attention_heads"),
        (json.dumps({**QWEN25_7B, "num_hidden_layers": 0}).encode(), "has no num_hidden_layers"),
        (json.dumps({**QWEN25_7B, "num_hidden_layers": "28"}).encode(), "has no num_hidden_layers"),
        (json.dumps({**QWEN25_7B, "torch_dtype": "int4"}).encode(), "unknown torch_dtype"),
    ],
)
def test_unusable_config_is_refused_with_the_reason(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(CouldNotCheckError) as caught:
        read_model_size(path)

    assert what in caught.value.what and caught.value.fix


def run(folder: Path, *arguments: str, config: dict[str, Any] = QWEN25_7B) -> Result:
    (folder / "config.json").write_text(json.dumps(config))
    return CliRunner().invoke(size, ["--model", str(folder), *arguments], standalone_mode=False)


def test_text_gives_the_number_to_set(tmp_path: Path) -> None:
    result = run(tmp_path, "--prompt-tokens", "8000", "--concurrency", "4")

    assert result.return_value == 0
    assert result.output.splitlines() == [
        "KV cache of one token:     56.00 KiB (57,344 bytes)",
        "                           (28 layers, 4 KV heads of 128, bfloat16)",
        "KV cache of one prompt:    437.51 MiB (458,759,168 bytes) (8000 tokens)",
        "set kv_buffer_size to:     1.9e+09 (4 in flight)",
        "host memory of each side:  1.77 GiB (1,900,000,000 bytes)",
    ]


def test_advised_buffer_is_read_back_as_a_size_that_holds_the_prompts(tmp_path: Path) -> None:
    advice = json.loads(run(tmp_path, "--prompt-tokens", "8000", "--concurrency", "4", "--format", "json").output)

    assert advice["kv_buffer_size"] >= 4 * advice["prompt_bytes"]
    assert advice["kv_buffer_size"] < 4.4 * advice["prompt_bytes"]


def test_prompt_longer_than_the_model_exits_1(tmp_path: Path) -> None:
    result = run(tmp_path, "--prompt-tokens", "40000")

    assert result.return_value == 1
    assert "does not fit: the model ends at 32768 tokens" in result.output


def test_prompt_larger_than_the_gpus_cache_exits_1(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(15 << 30)  # a sparse file: only its size counts

    small = run(tmp_path, "--prompt-tokens", "30000", "--gpu-memory", "20GiB", "--gpu-memory-utilization", "0.9")
    large = run(tmp_path, "--prompt-tokens", "30000", "--gpu-memory", "80GiB", "--gpu-memory-utilization", "0.9")

    assert (small.return_value, large.return_value) == (1, 0)
    assert "does not fit: the GPU's KV cache holds about 18724 tokens" in small.output


def test_heads_that_cannot_be_divided_are_named() -> None:
    advice = advise(
        model_size(QWEN25_7B, "x"),
        prompt_tokens=10,
        concurrency=1,
        tensor_parallel_size=3,
        gpu_memory_bytes=None,
        gpu_memory_utilization=0.9,
        weights_bytes=None,
    )

    assert advice.problems == ("4 KV heads cannot be divided among 3 ranks",)


def test_gpu_memory_needs_the_weights_to_be_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))

    result = CliRunner().invoke(size, ["--model", str(tmp_path), "--prompt-tokens", "1", "--gpu-memory", "20GiB"])

    assert result.exit_code == 2
    assert "needs the model's folder with its weights" in result.output


@pytest.mark.pin
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_of_a_block_are_those_of_the_pin(tmp_path: Path, ranks: int) -> None:
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig
    from vllm.worker.cache_engine import CacheEngine

    config = {**QWEN25_7B, "architectures": ["Qwen2ForCausalLM"], "intermediate_size": 100, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig(str(tmp_path), "auto", str(tmp_path), "auto", False, "auto", 0, skip_tokenizer_init=True)
    cache = CacheConfig(block_size=16, gpu_memory_utilization=0.9, swap_space=0, cache_dtype="auto")
    parallel = ParallelConfig(1, 1)
    parallel.tensor_parallel_size = ranks

    theirs = CacheEngine.get_cache_block_size(cache, model, parallel)

    assert read_model_size(tmp_path).token_bytes(ranks) * 16 == theirs
