"""Tiny random models whose KV or hidden states are not what a config's usual fields say; written once, in a second each.

As with `pin.tiny_model`, weights are drawn with a standard deviation at which one wrong block changes the whole answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.tiny_model import VOCAB_SIZE, write_tokenizer

MAX_TOKENS = 4096
WINDOW_TOKENS = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = {**_COMMON, "hidden_size": 192, "intermediate_size": 384}
# name → (class of transformers' configuration, its fields, why it is here)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma": (
        "GemmaConfig",
        {**_GATED, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": True},
        "head size is not hidden size / heads; one KV head; the pin compiles its norm in the first request",
    ),
    "mistral-nemo": (
        "MistralConfig",
        {**_GATED, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": None},
        "head size is not hidden size / heads",
    ),
    "mistral-window": (
        "MistralConfig",
        {
            **_GATED,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_window": WINDOW_TOKENS,
        },
        "attends to the last 64 tokens only",
    ),
    "qwen2-window": (
        "Qwen2Config",
        {
            **_GATED,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": WINDOW_TOKENS,
            "max_window_layers": 3,
        },
        "a window that the config switches on",
    ),
    "opt-projected": (
        "OPTConfig",
        {
            **{name: value for name, value in _COMMON.items() if name != "initializer_range"},
            "init_std": 0.1,
            "hidden_size": 256,
            "word_embed_proj_dim": 128,
            "ffn_dim": 512,
            "num_attention_heads": 4,
            "do_layer_norm_before": False,
            "pad_token_id": 1,
        },
        "the model's output is narrower than its hidden size",
    ),
}


def make_model(name: str) -> str:
    """The folder of one of MODELS."""
    folder = cache_folder() / f"tiny-{name}"
    recipe = repr(MODELS[name][:2])
    done = folder / "made"
    if not done.exists() or done.read_text() != recipe:
        _write(folder, name)
        done.write_text(recipe)
    return str(folder)


def _write(folder: Path, name: str) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, set_seed

    class_name, fields, _ = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, MAX_TOKENS)
    set_seed(0)
    AutoModelForCausalLM.from_config(getattr(transformers, class_name)(**fields)).float().save_pretrained(folder)
