"""What a failed leg means: whether the request may go elsewhere, whom to blame, and what the client is told."""

from __future__ import annotations

import json

from mooncake_v0.proxy.api_errors import ApiError, unavailable
from mooncake_v0.proxy.legs import Answer
from mooncake_v0.proxy.pairs import Instance

# kinds of failure; the first four are legs.LegError's
REFUSED, CONNECT, RESET, GARBAGE = "refused", "connect", "reset", "garbage"
TIMEOUT = "timeout"  # no answer in time
LOST = "lost"  # found dead or wedged while the request waited for it
BUSY = "busy"  # 429 or 503: backpressure, not a fault
STATUS = "status"  # any other 5xx
UNUSABLE = "unusable"  # prefill answered 200 with what is not JSON

# nothing was computed, or whoever computed it is gone: going elsewhere cannot start a storm of retries
EVIDENTLY_DEAD = frozenset({REFUSED, CONNECT, RESET, LOST})


class LegFailed(Exception):
    """One leg of an attempt failed before the client got a byte. `answer` is what the instance said, if anything."""

    def __init__(self, instance: Instance, kind: str, answer: Answer | None = None) -> None:
        super().__init__(f"{instance.role}: {kind}")
        self.instance = instance
        self.kind = kind
        self.answer = answer


def blame(failure: LegFailed, now_s: float) -> None:
    """Count a failure against the instance that caused it; backpressure and what probes found are no fault."""
    if failure.kind == REFUSED:
        failure.instance.refused()
    if failure.kind not in (BUSY, LOST):
        failure.instance.failed(now_s)


def failing_status(status: int) -> str:
    """The kind of failure that a status is, or "" when it is an answer to pass on."""
    if status in (429, 503):
        return BUSY
    return STATUS if status >= 500 else ""


def is_json(answer: Answer) -> bool:
    try:
        json.loads(answer.body)
    except (ValueError, RecursionError):
        return False
    return True


def told_to_client(failure: LegFailed) -> ApiError:
    """The error for a failure without a usable answer of the instance."""
    role = failure.instance.role
    code = f"{role}_{failure.kind}"
    if failure.kind == TIMEOUT:
        return ApiError(504, f"the {role} instance did not answer in time", kind="timeout", code=code)
    if failure.kind in (REFUSED, CONNECT):
        return unavailable(f"the {role} instance cannot be reached", code=code)
    if failure.kind == LOST:
        return unavailable(f"the {role} instance stopped responding", code=code)
    if failure.answer is not None:
        return wrapped(failure.answer.status, role, code)
    words = {RESET: "closed the connection", GARBAGE: "answered with something that is not HTTP"}
    return ApiError(502, f"the {role} instance {words.get(failure.kind, 'failed')}", kind="bad_gateway", code=code)


def wrapped(status: int, role: str, code: str) -> ApiError:
    """An instance's error status whose body is not JSON, in OpenAI's shape."""
    if status < 400:
        return ApiError(502, f"the {role} instance gave an answer that cannot be used", kind="bad_gateway", code=code)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(status, f"the {role} instance answered with status {status}", kind=kind, code=code)
