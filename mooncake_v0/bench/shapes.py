"""KV caches by a model's name or its config.json: how many bytes a token has and how they lie in a paged cache.

The built-in shapes are the published config.json files of the models (num_hidden_layers, num_key_value_heads, head_dim or
hidden_size / num_attention_heads); all are bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mooncake_v0.config.model_size import read_model_size
from mooncake_v0.errors import CouldNotCheckError

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class KVShape:
    """One rank's KV cache. element_bytes: of a key's or value's number; hidden_bytes: of one token's hidden row."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    hidden_size: int
    element_bytes: int = 2
    hidden_element_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.token_bytes

    def blocks(self, prompt_tokens: int) -> int:
        """Blocks of a prompt; the last one may be part empty and travels whole."""
        return -(-prompt_tokens // BLOCK_TOKENS)

    def entry_bytes(self, blocks: int) -> int:
        """What the lookup buffer stores: the blocks and the hidden row of the last token."""
        return blocks * self.block_bytes + self.hidden_size * self.hidden_element_bytes


SHAPES = {
    shape.name: shape
    for shape in (
        KVShape("tiny", layers=4, kv_heads=2, head_size=64, hidden_size=256),
        KVShape("qwen2.5-0.5b", layers=24, kv_heads=2, head_size=64, hidden_size=896),
        KVShape("qwen2.5-7b", layers=28, kv_heads=4, head_size=128, hidden_size=3584),
        KVShape("qwen2.5-72b", layers=80, kv_heads=8, head_size=128, hidden_size=8192),
        KVShape("llama-3.1-8b", layers=32, kv_heads=8, head_size=128, hidden_size=4096),
        KVShape("llama-3.1-70b", layers=80, kv_heads=8, head_size=128, hidden_size=8192),
        KVShape("qwen3-8b", layers=36, kv_heads=8, head_size=128, hidden_size=4096),
    )
}


def find_shape(name: str) -> KVShape:
    """A built-in shape by its name, or the shape of a model's folder or config.json.

    Raises CouldNotCheckError if it is neither, or the config lacks a number.
    """
    shape = SHAPES.get(name.lower())
    if shape is not None:
        return shape
    if not Path(name).exists():
        raise CouldNotCheckError(
            f"no model shape {name!r}, and no such file or folder",
            fix=f"use one of {', '.join(SHAPES)}, a model's folder or its config.json",
        )
    size = read_model_size(name, block_tokens=BLOCK_TOKENS)
    path = Path(name).resolve()
    return KVShape(
        path.parent.name if path.name == "config.json" else path.name,
        layers=size.layers,
        kv_heads=size.kv_heads,
        head_size=size.head_size,
        hidden_size=size.hidden_size,
        element_bytes=size.element_bytes,
        hidden_element_bytes=size.hidden_element_bytes,
    )
