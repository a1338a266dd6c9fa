"""What a client can ask of the engine, through the pair: the same answer as one instance, and decode computes no prompt."""

from __future__ import annotations

import importlib.util

import pytest

from mooncake_v0.pin.processes import Pair
from tests.e2e.features import FEATURES, NEED_OUTLINES, assert_same

# outlines imports it, and the environment of the tests may not have it
HAS_OUTLINES = importlib.util.find_spec("datasets") is not None

pytestmark = pytest.mark.pin


@pytest.mark.parametrize("name", [name for name in FEATURES if HAS_OUTLINES or name not in NEED_OUTLINES])
def test_feature_gives_the_answer_of_one_instance(plain_url: str, pair: Pair, tiny_model: str, name: str) -> None:
    assert_same(name, plain_url, pair, tiny_model)
