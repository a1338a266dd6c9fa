"""Spares the engine step milliseconds for every prompt of ten thousand tokens.

vLLM makes the tensors of a step's token ids, positions and slots with torch.tensor from lists of numbers (vllm
0.6.4.post1, utils.py:815), which looks at each number some 120 ns long; numpy takes a quarter of that. On decode, whose
step for a prompt computes nothing, this is much of what running answers wait for. And when a request is added, it makes an
array of the prompt's token ids, and of that twice as many new numbers, for a tuple and for a list (sequence.py:219), which
takes twice as long as to use those that came. Called only where a KV transfer is configured.
"""

from __future__ import annotations

import sys
from array import array
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


def make_sequence_data_of_the_same_numbers() -> None:
    """Wrap SequenceData.from_seqs, which is only called on the class; safe to call again."""
    from vllm.sequence import SequenceData

    wrap_once(SequenceData, "from_seqs", _with_the_same_numbers)


def _with_the_same_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_seqs(prompt_token_ids: Any, output_token_ids: Any = None) -> Any:
        ids = prompt_token_ids
        is_long = type(ids) is list and len(ids) >= _FEW and type(ids[0]) is type(ids[-1]) is int
        if not is_long or output_token_ids is not None:
            return original(prompt_token_ids, output_token_ids)
        data = original([])
        data._prompt_token_ids = array("l", ids)
        data._prompt_token_ids_tuple = tuple(ids)
        data._cached_all_token_ids = ids.copy()
        return data

    return from_seqs


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
