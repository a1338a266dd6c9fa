"""Spares the engine step milliseconds for every prompt of ten thousand tokens.

vLLM makes the tensors of a step's token ids, positions and slots with torch.tensor from lists of numbers (vllm
0.6.4.post1, utils.py:815), which looks at each number some 120 ns long; numpy takes a quarter of that. On decode, whose
step for a prompt computes nothing, this is much of what running answers wait for. Called only where a KV transfer is
configured.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

import numpy as np
import torch

from mooncake_v0.vllm_plugin.wrapping import wrap_once

_NAME = "async_tensor_h2d"
_FEW = 256


def make_long_tensors_with_numpy() -> None:
    """Wrap the function in each of vLLM's modules that has it by now; safe to call again."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and hasattr(module, _NAME):
            wrap_once(module, _NAME, _with_numpy)


def _with_numpy(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def async_tensor_h2d(
        data: list[Any], dtype: torch.dtype, target_device: str | torch.device, pin_memory: bool
    ) -> torch.Tensor:
        numbers = _whole_numbers(data)
        if numbers is None:
            return original(data, dtype, target_device, pin_memory)
        tensor = torch.from_numpy(numbers).to(dtype)
        if pin_memory:
            tensor = tensor.pin_memory()
        return tensor.to(device=target_device, non_blocking=True)

    return async_tensor_h2d


def _whole_numbers(data: Any) -> np.ndarray[Any, Any] | None:
    """int64; None for what is short, nested or of something else."""
    if type(data) is not list or len(data) < _FEW:
        return None
    try:
        numbers = np.array(data)
    except ValueError:  # lists of different lengths
        return None
    return numbers if numbers.ndim == 1 and numbers.dtype == np.int64 else None
