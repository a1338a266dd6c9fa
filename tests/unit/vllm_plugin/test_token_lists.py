"""Lists of token ids reach the tokenizer as they are; everything else as transformers would have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import tokenization_utils_base
from transformers.utils import generic

from mooncake_v0.vllm_plugin.token_lists import pass_token_lists


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization_utils_base, "to_py_obj", generic.to_py_obj)
    pass_token_lists()
    pass_token_lists()


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1, 2, 3],
        (1, 2),
        [[1, 2], [3]],
        7,
        None,
        [1, "two", 3.0],
        [np.int64(4), 5],
        [True, 1],
        torch.tensor([[1, 2]]),
        [torch.tensor(3), 4],
        np.array([5, 6]),
        {"input_ids": [1], "mask": torch.tensor([1])},
    ],
    ids=repr,
)
def test_result_is_that_of_transformers(value: Any) -> None:
    ours, theirs = tokenization_utils_base.to_py_obj(value), generic.to_py_obj(value)

    assert ours == theirs
    assert repr(ours) == repr(theirs)


def test_no_id_of_a_prompt_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(generic, "_get_frameworks_and_test_func", lambda value: asked.append(value) or {})
    ids = list(range(1000))

    copy = tokenization_utils_base.to_py_obj(ids)

    assert copy == ids and copy is not ids and not asked
