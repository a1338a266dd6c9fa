"""A step's tensors are those that vLLM makes, whatever the list; long lists of numbers go past torch.tensor."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import utils

from mooncake_v0.vllm_plugin.input_tensors import make_long_tensors_with_numpy

LONG = 1000
USERS = (
    "vllm.utils",
    "vllm.worker.model_runner",
    "vllm.attention.backends.utils",
    "vllm.model_executor.sampling_metadata",
)
ORIGINAL = utils.async_tensor_h2d


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USERS:
        monkeypatch.setattr(importlib.import_module(name), "async_tensor_h2d", ORIGINAL)
    make_long_tensors_with_numpy()
    make_long_tensors_with_numpy()


LISTS: dict[str, list[Any]] = {
    "none": [],
    "few": [1, 2, 3],
    "ids": list(range(LONG)),
    "slots": list(np.arange(LONG) * 3),
    "mixed": [*range(LONG), *np.arange(5)],
    "negative": [-1] * LONG,
    "fractions": [index / 7 for index in range(LONG)],
    "truth": [index % 3 == 0 for index in range(LONG)],
    "rows": [[index, index + 1] for index in range(LONG)],
    "int32": list(np.arange(LONG, dtype=np.int32)),
}


@pytest.mark.parametrize("dtype", [torch.long, torch.int, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("data", LISTS.values(), ids=LISTS)
def test_tensor_is_the_one_that_vllm_makes(data: list[Any], dtype: torch.dtype) -> None:
    theirs = ORIGINAL(data, dtype, "cpu", False)

    for name in USERS:
        ours = importlib.import_module(name).async_tensor_h2d(data, dtype, torch.device("cpu"), pin_memory=False)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "data", [[[1], *[[2, 3]] * LONG], ["one"] * LONG, [1 << 70] * LONG], ids=["ragged", "words", "huge"]
)
def test_what_vllm_refuses_is_refused(data: list[Any]) -> None:
    for make in (ORIGINAL, utils.async_tensor_h2d):
        with pytest.raises((ValueError, TypeError, RuntimeError, OverflowError)):
            make(data, torch.long, "cpu", False)


def test_no_number_of_a_long_prompt_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "tensor", mock.Mock(side_effect=AssertionError))

    assert utils.async_tensor_h2d(LISTS["slots"], torch.long, "cpu", False).tolist() == LISTS["slots"]
