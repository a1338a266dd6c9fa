"""What makes two instances refuse each other, on the pin's own attention layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncake_v0.kv.layout import KVLayout
from mooncake_v0.vllm_plugin.fingerprint import model_fingerprint

pytestmark = pytest.mark.pin


class Model(torch.nn.Module):
    """Two layers of vLLM's attention and a projection."""

    def __init__(self) -> None:
        from vllm.attention import Attention

        super().__init__()
        self.layers = torch.nn.ModuleList([Attention(2, 64, 1.0) for _ in range(2)])
        self.weight = torch.nn.Parameter(torch.arange(64.0).reshape(8, 8))
        self.packed = torch.nn.Parameter(torch.zeros(8, dtype=torch.int32), requires_grad=False)


def fingerprint(model: torch.nn.Module, **changes: Any) -> dict[str, str]:
    hf_config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": changes.pop("path", "/a")})
    fields: dict[str, Any] = {"dtype": torch.bfloat16, "cache_dtype": "auto", "quantization": None, "block_size": 16}
    fields.update(changes)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, dtype=fields["dtype"], quantization=fields["quantization"]),
        cache_config=SimpleNamespace(cache_dtype=fields["cache_dtype"], block_size=fields["block_size"]),
    )
    layout = KVLayout([torch.zeros(2, 4, 16, dtype=torch.uint8)], 1)
    return model_fingerprint(config, model, layout, "flash-attn")


def test_equal_models_in_other_folders_agree() -> None:
    assert fingerprint(Model(), path="/a") == fingerprint(Model(), path="/b")


@pytest.mark.parametrize(
    "changes",
    [{"cache_dtype": "fp8_e5m2"}, {"dtype": torch.float16}, {"quantization": "gptq"}, {"block_size": 32}],
    ids=str,
)
def test_instances_with_another_cache_or_quantisation_differ(changes: dict[str, Any]) -> None:
    assert fingerprint(Model(), **changes) != fingerprint(Model())


def test_other_weights_differ() -> None:
    model = Model()
    with torch.no_grad():
        model.weight[0, 0] = 3.0

    assert fingerprint(model)["weights"] != fingerprint(Model())["weights"]


@pytest.mark.parametrize("scale", ["_k_scale", "_v_scale"])
def test_other_scales_of_an_fp8_cache_differ(scale: str) -> None:
    """They are plain numbers after loading; bytes that were quantised with one mean something else with another."""
    model = Model()
    setattr(model.layers[1], scale, 0.5)

    assert fingerprint(model)["weights"] != fingerprint(Model())["weights"]


def test_packed_integers_are_left_out() -> None:
    """A dummy load leaves them as memory was."""
    model = Model()
    model.packed.data.fill_(7)

    assert fingerprint(model) == fingerprint(Model())
