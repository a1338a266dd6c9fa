"""The proxy's own errors, in the shape of OpenAI's API. Raised while a request is served, rendered by the relay.

Errors of an instance are not made here: their bytes are passed on.
"""

from __future__ import annotations

import json


class ApiError(Exception):
    """An answer that is an error. Never names an instance's address: clients need not know them.

    status:         HTTP status
    kind:           the `type` field, one of OpenAI's words
    retry_after_s:  sent as Retry-After where trying again can help
    """

    def __init__(
        self, status: int, message: str, *, kind: str = "server_error", code: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code or kind
        self.retry_after_s = retry_after_s

    def body(self, request_id: str) -> bytes:
        """The JSON body: {"error": {"message", "type", "param", "code", "request_id"}}."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": None,
            "code": self.code,
            "request_id": request_id,
        }
        return json.dumps({"error": error}).encode()


def invalid_request(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, kind="invalid_request_error", code=code)


def unavailable(message: str, *, code: str = "no_pair_available", retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, kind="service_unavailable", code=code, retry_after_s=retry_after_s)


def overloaded(message: str, *, retry_after_s: int) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="proxy_overloaded", retry_after_s=retry_after_s)


def sse_error_event(error: ApiError, request_id: str) -> bytes:
    """The end of a stream that broke after its first byte: an error event, then the end marker."""
    return b"data: " + error.body(request_id) + b"\n\ndata: [DONE]\n\n"
