"""What a key takes from LoRA and prompt adapters: requests of two adapters never share KV, whatever they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.vllm_plugin.fingerprint import adapter_identity

pytestmark = pytest.mark.pin


def write_adapter(folder: Path, weights: bytes = b"weights", **files: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return str(folder)


def lora(path: str, number: int = 1, name: str = "any") -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path)


def prompt_adapter(path: str, number: int = 1) -> Any:
    from vllm.prompt_adapter.request import PromptAdapterRequest

    return PromptAdapterRequest("any", number, path, 8)


def test_the_base_model_has_no_adapter() -> None:
    assert adapter_identity(None, None) == b""


def test_two_adapters_of_one_base_and_the_base_itself_differ(tmp_path: Path) -> None:
    a, b = write_adapter(tmp_path / "a", b"one"), write_adapter(tmp_path / "b", b"two")

    assert len({adapter_identity(lora(a), None), adapter_identity(lora(b, 2), None), adapter_identity(None, None)}) == 3


def test_one_adapter_is_the_same_under_every_path_name_and_number(tmp_path: Path) -> None:
    here, there = write_adapter(tmp_path / "prefill"), write_adapter(tmp_path / "decode")

    assert adapter_identity(lora(here, 1, "x"), None) == adapter_identity(lora(there, 7, "y"), None)


@pytest.mark.parametrize("changed", ["weights", "config", "new_embeddings"])
def test_every_file_that_vllm_loads_of_an_adapter_counts(tmp_path: Path, changed: str) -> None:
    first = write_adapter(tmp_path / "first")
    second = write_adapter(tmp_path / "second", b"others" if changed == "weights" else b"weights")
    if changed == "config":
        (tmp_path / "second" / "adapter_config.json").write_text('{"r": 16}')
    if changed == "new_embeddings":
        write_adapter(tmp_path / "second", new_embeddings__safetensors=b"tokens")

    assert adapter_identity(lora(first), None) != adapter_identity(lora(second), None)


def test_an_adapter_loaded_again_from_the_same_path_is_looked_at_again(tmp_path: Path) -> None:
    """vLLM gives every load another number; the old one keeps its weights until it is unloaded."""
    path = write_adapter(tmp_path / "adapter", b"old")
    old = adapter_identity(lora(path, 1), None)
    write_adapter(tmp_path / "adapter", b"new")

    assert adapter_identity(lora(path, 1), None) == old
    assert adapter_identity(lora(path, 2), None) != old


def test_a_path_from_the_home_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_adapter(tmp_path / "adapter", b"at home")

    assert adapter_identity(lora("~/adapter", 3), None) == adapter_identity(lora(path, 3), None)


def test_a_path_without_an_adapter_matches_nothing_of_the_other_side() -> None:
    assert adapter_identity(lora("/nowhere", 1), None) != adapter_identity(lora("/nowhere", 2), None)


def test_lora_and_prompt_adapters_of_the_same_bytes_differ_and_add_up(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    found = [
        adapter_identity(lora(path), None),
        adapter_identity(None, prompt_adapter(path)),
        adapter_identity(lora(path), prompt_adapter(path)),
    ]

    assert len(set(found)) == 3


def test_two_prompt_adapters_differ(tmp_path: Path) -> None:
    a, b = write_adapter(tmp_path / "a", b"one"), write_adapter(tmp_path / "b", b"two")

    assert adapter_identity(None, prompt_adapter(a)) != adapter_identity(None, prompt_adapter(b, 2))
