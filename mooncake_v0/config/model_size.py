"""How many bytes of KV cache a model makes for a prompt, from its config.json alone.

The arithmetic is vLLM 0.6.4.post1's (vllm/config.py: get_head_size, get_total_num_kv_heads, get_num_kv_heads;
worker/cache_engine.py: get_cache_block_size). Called by `mooncake-v0 size`, and by the launch rules for kv_buffer_size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from mooncake_v0.errors import CouldNotCheckError

DEFAULT_BLOCK_TOKENS = 16
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
KV_HEAD_NAMES = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
LAYER_NAMES = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
ATTENTION_HEAD_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model")
POSITION_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelSize:
    """What a model's KV cache is made of. kv_heads counts the whole model, before tensor parallelism."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    element_bytes: int
    hidden_size: int
    hidden_element_bytes: int
    max_position_tokens: int | None
    block_tokens: int = DEFAULT_BLOCK_TOKENS

    def token_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Keys and values of one token on one rank: 2 x layers x heads of the rank x head size x bytes of an element.

        With fewer KV heads than ranks, vLLM repeats the heads: each rank has at least one.
        """
        heads = max(1, self.kv_heads // tensor_parallel_size)
        return 2 * self.layers * heads * self.head_size * self.element_bytes

    def prompt_bytes(self, prompt_tokens: int, tensor_parallel_size: int = 1) -> int:
        """What the lookup buffer of one rank stores for a prompt: whole blocks, and the last token's hidden row."""
        blocks = -(-prompt_tokens // self.block_tokens)
        return (
            blocks * self.block_tokens * self.token_bytes(tensor_parallel_size)
            + self.hidden_size * self.hidden_element_bytes
        )


def read_model_size(
    model: str | Path,
    *,
    kv_cache_dtype: str | None = None,
    dtype: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> ModelSize:
    """The size of the model in a folder, or described by a config.json.

    Raises CouldNotCheckError if the file cannot be read or lacks a number that is needed, naming it.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    config = _read(path)
    return model_size(config, str(path), kv_cache_dtype=kv_cache_dtype, dtype=dtype, block_tokens=block_tokens)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except OSError as error:
        fix = "give the model's folder or its config.json; a name on a hub must be downloaded first"
        raise CouldNotCheckError(f"{path} cannot be read: {error.strerror}", fix=fix) from error
    except (ValueError, RecursionError) as error:
        raise CouldNotCheckError(f"{path} is not JSON: {error}", fix="give the model's config.json") from error
    if not isinstance(config, dict):
        raise CouldNotCheckError(f"{path} does not hold an object", fix="give the model's config.json")
    return config


def model_size(
    config: Mapping[str, Any],
    path: str,
    *,
    kv_cache_dtype: str | None = None,
    dtype: str | None = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> ModelSize:
    """The size by a config.json's content. Raises CouldNotCheckError for a number that is missing or not positive."""
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) and "num_attention_heads" in nested else config
    heads = _number(text, ATTENTION_HEAD_NAMES, path)
    hidden = _number(text, HIDDEN_NAMES, path)
    weights = _dtype(dtype, text, config, path)
    cache = weights if kv_cache_dtype in (None, "auto") else str(kv_cache_dtype)
    if cache not in DTYPE_BYTES:
        raise CouldNotCheckError(f"unknown type of KV cache {cache!r}", fix="use auto, fp8, fp8_e4m3 or fp8_e5m2")
    return ModelSize(
        layers=_number(text, LAYER_NAMES, path),
        kv_heads=_kv_heads(config, text, heads),
        head_size=_head_size(text, hidden, heads),
        dtype=cache,
        element_bytes=DTYPE_BYTES[cache],
        hidden_size=hidden,
        hidden_element_bytes=DTYPE_BYTES[weights],
        max_position_tokens=_optional(text, POSITION_NAMES),
        block_tokens=block_tokens,
    )


def _head_size(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    if text.get("model_type") == "deepseek_v2":
        return 256  # 0.6.4.post1 pads the head size of 192
    return _optional(text, ("head_dim",)) or hidden // heads


def _kv_heads(config: Mapping[str, Any], text: Mapping[str, Any], heads: int) -> int:
    """As get_total_num_kv_heads: Falcon's and GPTBigCode's multi_query, MPT's and DBRX's attn_config, then the names."""
    kind = config.get("model_type")
    new_falcon = kind in ("falcon", "RefinedWeb", "RefinedWebModel") and config.get("new_decoder_architecture")
    if not new_falcon and text.get("multi_query"):
        return 1
    if kind in ("mpt", "dbrx"):
        attention = config.get("attn_config")
        return (_optional(attention, ("kv_n_heads",)) if isinstance(attention, dict) else None) or heads
    return _optional(text, KV_HEAD_NAMES) or heads


def _dtype(dtype: str | None, text: Mapping[str, Any], config: Mapping[str, Any], path: str) -> str:
    """As vLLM's `auto`: the checkpoint's type, float32 run as float16."""
    if dtype not in (None, "auto"):
        name = str(dtype)
    else:
        own = (
            text.get("torch_dtype")
            or config.get("torch_dtype")
            or text.get("dtype")
            or config.get("dtype")
            or "float32"
        )
        name = str(own).replace("torch.", "")
        name = "float16" if name == "float32" else name
    if name not in DTYPE_BYTES:
        raise CouldNotCheckError(f"{path}: unknown torch_dtype {name!r}", fix="give --dtype float16 or bfloat16")
    return name


def _optional(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return value
    return None


def _number(config: Mapping[str, Any], names: tuple[str, ...], path: str) -> int:
    value = _optional(config, names)
    if value is None:
        fix = "give the config.json of a decoder model"
        raise CouldNotCheckError(f"{path} has no {names[0]} (or {', '.join(names[1:])}) above 0", fix=fix)
    return value
