"""A worker whose transfer could not be set up computes its requests, and leaves no other rank waiting."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


class ProducerWithoutAgent:
    """Records what a step did with its entries; stands for `kv.connector.Producer` and its `StepStore`."""

    hidden_size, hidden_dtype = 4, torch.float32

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.prompts: list[Any] = []
        self.follows_layers = False
        self.client = SimpleNamespace(step=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name) or self


@pytest.mark.parametrize(
    ("output", "calls"),
    [
        (torch.zeros(1, 4), ["reserve", "finish"]),
        (torch.zeros(1, 8), ["reserve", "abort", "count"]),
        (torch.zeros(1, 4, dtype=torch.bfloat16), ["reserve", "abort", "count"]),
        (torch.zeros(1, 4, 1), ["reserve", "abort", "count"]),
    ],
    ids=["rows", "wider rows", "another type", "three dimensions"],
)
def test_output_that_is_not_the_expected_rows_is_returned_and_not_stored(
    output: torch.Tensor, calls: list[str]
) -> None:
    transfer, _ = transfer_without_agent("kv_producer")
    producer: Any = ProducerWithoutAgent()
    transfer.producer = producer
    transfer._plan = PLAN

    assert transfer._forward(lambda *args, **kwargs: output)("input") is output
    assert producer.calls == calls
    assert (transfer.producer is None) == ("abort" in calls)
