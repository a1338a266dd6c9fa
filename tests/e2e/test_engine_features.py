"""What a client can ask of the engine, through the pair: the same answer as one instance, and decode computes no prompt."""

from __future__ import annotations

import importlib.util

import pytest

from mooncake_v0.pin.processes import Pair
from tests.e2e.features import FEATURES, NEED_OUTLINES, assert_same

HAS_OUTLINES = importlib.util.find_spec("datasets") is not None  # outlines does not import without it
# one request with outlines: each process that imports it takes seconds for that
NAMES = [name for name in FEATURES if name not in NEED_OUTLINES or (HAS_OUTLINES and name == NEED_OUTLINES[1])]

pytestmark = pytest.mark.pin


@pytest.mark.parametrize("name", NAMES)
def test_feature_gives_the_answer_of_one_instance(plain_url: str, pair: Pair, tiny_model: str, name: str) -> None:
    assert_same(name, plain_url, pair, tiny_model)
