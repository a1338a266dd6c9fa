"""A step's tensors are those that vLLM makes, whatever the list; long lists of numbers go past torch.tensor."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import utils
from vllm.sequence import SequenceData

from mooncake_v0.vllm_plugin.input_tensors import make_long_tensors_with_numpy, make_sequence_data_of_the_same_numbers

LONG = 1000
USERS = (
    "vllm.utils",
    "vllm.worker.model_runner",
    "vllm.attention.backends.utils",
    "vllm.model_executor.sampling_metadata",
)
ORIGINAL = utils.async_tensor_h2d
FROM_SEQS = SequenceData.from_seqs


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in USERS:
        monkeypatch.setattr(importlib.import_module(name), "async_tensor_h2d", ORIGINAL)
    make_long_tensors_with_numpy()
    make_long_tensors_with_numpy()
    monkeypatch.setattr(SequenceData, "from_seqs", staticmethod(FROM_SEQS))
    make_sequence_data_of_the_same_numbers()
    make_sequence_data_of_the_same_numbers()


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


PROMPTS: dict[str, Any] = {
    "none": [],
    "few": [1, 2, 3],
    "long": list(range(LONG)),
    "a tuple": tuple(range(LONG)),
    "numpy's numbers": list(np.arange(LONG)),
    "truth": [index % 3 == 0 for index in range(LONG)],
}


@pytest.mark.parametrize("output", [None, [7, 8]], ids=["prompt", "with output"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_sequence_data_is_that_of_vllm(prompt: Any, output: list[int] | None) -> None:
    ours, theirs = SequenceData.from_seqs(prompt, output), FROM_SEQS(prompt, output)

    for data in (ours, theirs):
        data.append_token_id(9, -0.5)
    assert ours == theirs and repr(ours) == repr(theirs)
    assert ours.get_token_ids() == theirs.get_token_ids() == [*prompt, *(output or []), 9]
    assert {type(one) for one in ours.get_token_ids()} == {int}


def test_a_long_prompt_is_not_made_of_new_numbers() -> None:
    prompt = list(range(10_000, 10_000 + LONG))

    data = SequenceData.from_seqs(prompt)
    first, prompt[0] = prompt[0], 0

    assert data.prompt_token_ids[0] is data.get_token_ids()[0] is first
