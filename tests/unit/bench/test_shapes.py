from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake_v0.bench.shapes import SHAPES, find_shape
from mooncake_v0.errors import CouldNotCheckError


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [("qwen3-8b", 147_456), ("qwen2.5-7b", 57_344), ("llama-3.1-8b", 131_072), ("tiny", 2048), ("Qwen3-8B", 147_456)],
)
def test_a_named_shape_has_the_models_bytes_a_token(name: str, token_bytes: int) -> None:
    assert find_shape(name).token_bytes == token_bytes


@pytest.mark.parametrize("name", SHAPES)
def test_a_shapes_entry_is_whole_blocks_and_one_hidden_row(name: str) -> None:
    shape = SHAPES[name]

    assert shape.blocks(17) == 2
    assert shape.entry_bytes(2) == 32 * shape.token_bytes + 2 * shape.hidden_size


@pytest.mark.parametrize("given", ["", "config.json"])
def test_a_shape_is_read_from_a_models_folder_or_config(tmp_path: Path, given: str) -> None:
    config = {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    shape = find_shape(str(tmp_path / given))

    assert (shape.name, shape.token_bytes, shape.hidden_size) == (tmp_path.name, 2 * 3 * 2 * 32 * 2, 128)


def test_an_unknown_model_names_the_known_shapes() -> None:
    with pytest.raises(CouldNotCheckError, match="no model shape 'qwen9'") as caught:
        find_shape("qwen9")

    assert "qwen3-8b" in caught.value.fix
