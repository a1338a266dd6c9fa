"""What is remembered of one request: for its log line and for the metrics. Never a prompt, never a key."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

# the order of UsageInfo's fields in vLLM 0.6.4.post1, entrypoints/openai/protocol.py
USAGE = re.compile(rb'"usage":\s*\{"prompt_tokens":\s*(\d+),\s*"total_tokens":\s*\d+,\s*"completion_tokens":\s*(\d+)')
USAGE_WITHIN_BYTES = 512


@dataclass
class Record:
    """Filled while the request is served; times in seconds on the monotonic clock, 0.0 where it did not happen.

    disaggregated:  "yes", "fallback" (prefill was wanted but could not serve), "skipped" (not wanted), "" (no decode)
    early:          decode's leg was sent together with prefill's
    outcome:        "ok", "client_error", "error", "client_gone", "broken" (after the first byte)
    """

    request_id: str
    path: str
    start_s: float = field(default_factory=time.monotonic)
    stream: bool = False
    pair: str = ""
    disaggregated: str = ""
    skip_reason: str = ""
    early: bool = False
    prompt_tokens: int = 0
    body_bytes: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    gap_s: float = 0.0
    first_byte_s: float = 0.0
    total_s: float = 0.0
    events: int = 0
    usage_prompt_tokens: int = 0
    usage_completion_tokens: int = 0
    attempts: int = 0
    status: int = 0
    bytes_sent: int = 0
    outcome: str = ""
    error: str = ""
    phase: str = "body"

    def find_usage(self, end_of_body: bytes) -> None:
        """Take the token counts from the end of decode's answer, where vLLM writes them, if they are there."""
        found = USAGE.search(end_of_body)
        if found is not None:
            self.usage_prompt_tokens, self.usage_completion_tokens = int(found[1]), int(found[2])

    def log_fields(self) -> dict[str, Any]:
        """The access log line."""
        return {
            "request_id": self.request_id,
            "path": self.path,
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "phase": self.phase,
            "pair": self.pair,
            "disaggregated": self.disaggregated,
            "skip_reason": self.skip_reason,
            "early": self.early,
            "stream": self.stream,
            "attempts": self.attempts,
            "prompt_tokens_estimate": self.prompt_tokens,
            "prompt_tokens": self.usage_prompt_tokens,
            "completion_tokens": self.usage_completion_tokens,
            "body_bytes": self.body_bytes,
            "bytes_sent": self.bytes_sent,
            "queued_ms": round(self.queued_s * 1000, 3),
            "prefill_ms": round(self.prefill_s * 1000, 3),
            "first_byte_ms": round(self.first_byte_s * 1000, 3),
            "total_ms": round(self.total_s * 1000, 3),
        }
