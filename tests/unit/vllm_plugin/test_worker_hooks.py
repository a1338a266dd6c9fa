"""A worker whose transfer could not be set up computes its requests, and leaves no other rank waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_v0.kv.transfer_plan import PromptPlan, TransferPlan
from mooncake_v0.vllm_plugin.kv_transfer_config import KVTransferConfig
from mooncake_v0.vllm_plugin.worker_hooks import WorkerTransfer

PLAN = TransferPlan([PromptPlan(b"k" * 16, b"\0" * 4, 0, 0, 1)], 1, True)
PARTIAL = TransferPlan(PLAN.prompts, 2, False)


def transfer_without_agent(role: str) -> tuple[WorkerTransfer, list[bool]]:
    """What is left when `_connect` has failed, and the votes that its group gets."""
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_role=role), parallel_config=SimpleNamespace(tensor_parallel_size=1)
    )
    transfer = WorkerTransfer(SimpleNamespace(), config)
    votes: list[bool] = []

    def agree(here: bool) -> bool:
        votes.append(here)
        return here

    transfer._agree = agree
    return transfer, votes


@pytest.mark.parametrize(
    ("role", "plan", "votes"),
    [
        ("kv_producer", PLAN, []),
        ("kv_consumer", PLAN, [False]),
        ("kv_consumer", PARTIAL, []),
        ("kv_consumer", None, []),
    ],
    ids=["producer", "consumer", "batch that nobody votes on", "decode step"],
)
def test_rank_without_transfer_runs_the_forward_and_votes_where_the_others_do(
    role: str, plan: Any, votes: list[bool]
) -> None:
    transfer, cast = transfer_without_agent(role)
    transfer._plan = plan

    result = transfer._forward(lambda *args, **kwargs: "computed")("input")

    assert result == "computed"
    assert cast == votes
