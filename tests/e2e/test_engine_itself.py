"""What the engine does by itself: a model of another shape, preemption on either side, clients that leave."""

from __future__ import annotations

from typing import Iterator

import pytest

from tests.e2e import engine_suites
from tests.e2e.engine_suites import FEW_BLOCKS, Servers, serve
from tests.e2e.models import make_model

pytestmark = pytest.mark.pin


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Heads wider than hidden size / heads, float32; the pair's KV cache holds 1,600 tokens."""
    with serve(make_model("mistral-nemo"), tmp_path_factory.mktemp("nemo"), pair_args=FEW_BLOCKS) as started:
        yield started


def test_a_model_whose_head_size_does_not_follow_from_its_hidden_size(servers: Servers) -> None:
    engine_suites.check_lengths(servers)


def test_preempted_requests_of_decode_are_answered_right(servers: Servers) -> None:
    engine_suites.check_preemption_on_decode(servers)


def test_preempted_requests_of_prefill_leave_right_kv(servers: Servers) -> None:
    engine_suites.check_preemption_on_prefill(servers)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(servers: Servers) -> None:
    engine_suites.check_aborts(servers, requests=24)
