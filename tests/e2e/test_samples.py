"""Streams with several samples: each comes to its end, whichever ends first."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import pytest

from mooncake_v0.pin.processes import Pair
from tests.e2e.asking import TIMEOUT_S, token_prompt

pytestmark = pytest.mark.pin

SAMPLES = 4
MAX_TOKENS = 40


@dataclass
class Streamed:
    """What came of one sample."""

    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None


def stream(url: str, body: dict[str, Any]) -> tuple[list[Streamed], int]:
    """The samples of a stream, and how many tokens its usage tells of."""
    samples, usage = [Streamed() for _ in range(SAMPLES)], 0
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        lines = [line[6:] for line in answer if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"[DONE]"
    for line in lines[:-1]:
        event = json.loads(line)
        usage = (event.get("usage") or {}).get("completion_tokens", usage)
        for choice in event["choices"]:
            sample = samples[choice["index"]]
            sample.tokens += (choice["logprobs"] or {}).get("tokens", [])
            sample.finish_reason = choice["finish_reason"] or sample.finish_reason
    return samples, usage


def test_samples_that_outlive_the_first_are_streamed_to_their_end(pair: Pair) -> None:
    outlived = 0
    for number in range(8):
        body = {
            "model": pair.options.model,
            "prompt": token_prompt(40, number),
            "n": SAMPLES,
            "temperature": 1.0,
            "max_tokens": MAX_TOKENS,
            "logprobs": 0,
            "stop_token_ids": list(range(3, 512, 16)),
        }
        samples, usage = stream(pair.proxy_url, body)

        assert [sample.finish_reason for sample in samples if sample.finish_reason not in ("stop", "length")] == []
        assert all(len(one.tokens) == MAX_TOKENS for one in samples if one.finish_reason == "length")
        assert sum(len(sample.tokens) for sample in samples) == usage
        outlived += max(len(sample.tokens) for sample in samples) > len(samples[0].tokens)

    assert outlived >= 2  # of eight times three in four
