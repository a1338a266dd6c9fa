"""Whatever an instance does, the client learns the truth: never an empty 200, always JSON in OpenAI's shape."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mooncake_v0.handoff import HEADER
from tests.proxy import backend
from tests.proxy.backend import Behaviour, answer, vllm_error
from tests.proxy.conftest import HURRIED, PATIENT, Running, StartProxy

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
FAULTS: dict[str, Behaviour] = {
    **{str(status): answer(status, vllm_error(status)) for status in (400, 401, 404, 422, 500, 503)},
    "reset": backend.reset,
    "timeout": backend.silence,
    "garbage": backend.garbage,
}
FINAL = {"400": 400, "401": 401, "404": 404, "422": 422}
DECODE_STATUS = {**FINAL, "500": 500, "503": 503, "reset": 502, "timeout": 504, "garbage": 502, "refused": 503}
STREAMED = [pytest.param(False, id="json"), pytest.param(True, id="sse")]


@pytest.fixture(params=[False, True], ids=["in turn", "at once"])
def start_proxy(start_proxy: StartProxy, request: pytest.FixtureRequest) -> StartProxy:
    """Of pairs that are asked in turn, and of pairs that get both legs at once."""

    async def start(**options: Any) -> Running:
        return await start_proxy(early=request.param, **options)

    return start


def asked(instance: backend.Backend) -> list[backend.Received]:
    """What it was asked for certain: not the legs that may be taken back."""
    return [one for one in instance.posts() if HEADER not in one.headers]


def error_of(body: bytes) -> dict[str, Any]:
    """The error object of either shape: OpenAI's nested one, or vLLM's flat one."""
    value = json.loads(body)
    error: dict[str, Any] = value.get("error", value)
    assert error["message"] and error["type"] and error["code"]
    return error


async def with_fault(start_proxy: StartProxy, role: str, fault: str, **changes: Any) -> Running:
    """A proxy over one pair, one of whose instances has the fault."""
    running = await start_proxy(timeouts=HURRIED if fault == "timeout" else PATIENT.timeouts, **changes)
    instance = getattr(running, role)
    if fault == "refused":
        await instance.stop()
    else:
        instance.behaviour = FAULTS[fault]
    return running


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("fault", [*FAULTS, "refused"])
async def test_decode_fault_reaches_the_client_as_an_error(start_proxy: StartProxy, fault: str, stream: bool) -> None:
    running = await with_fault(start_proxy, "decode", fault)

    status, headers, body = await running.post({**BODY, "stream": stream})

    assert status == DECODE_STATUS[fault]
    assert headers["content-type"] == "application/json"
    assert error_of(body)
    assert str(running.decode.port) not in body.decode()


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("fault", ["401", "404"])
async def test_prefill_refusal_is_passed_on_and_decode_not_asked(
    start_proxy: StartProxy, fault: str, stream: bool
) -> None:
    running = await with_fault(start_proxy, "prefill", fault)

    status, headers, body = await running.post({**BODY, "stream": stream})

    assert (status, body) == (FINAL[fault], vllm_error(FINAL[fault]))
    assert headers["content-type"] == "application/json"
    assert asked(running.decode) == []


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("fault", list(FINAL))
async def test_refusal_by_a_required_prefill_is_passed_on(start_proxy: StartProxy, fault: str, stream: bool) -> None:
    running = await with_fault(start_proxy, "prefill", fault, require_prefill=True)

    status, _, body = await running.post({**BODY, "stream": stream})

    assert (status, body) == (FINAL[fault], vllm_error(FINAL[fault]))
    assert asked(running.decode) == []


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("fault", ["400", "422"])
async def test_fields_that_prefill_refuses_are_refused_in_the_words_of_decode(
    start_proxy: StartProxy, fault: str, stream: bool
) -> None:
    running = await with_fault(start_proxy, "prefill", fault)
    refusal = b'{"object":"error","message":"quotes the client","type":"BadRequestError","code":400}'
    running.decode.behaviour = answer(400, refusal)

    status, headers, body = await running.post({**BODY, "stream": stream})

    assert (status, body) == (400, refusal)
    assert headers["x-mooncake-disaggregated"] == "skipped"
    assert running.log_lines()[0]["skip_reason"] == "refused_by_prefill"


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("fault", ["500", "503", "reset", "timeout", "garbage", "refused"])
async def test_decode_serves_alone_when_prefill_cannot(start_proxy: StartProxy, fault: str, stream: bool) -> None:
    running = await with_fault(start_proxy, "prefill", fault)

    status, headers, body = await running.post({**BODY, "stream": stream})

    assert status == 200
    assert headers["x-mooncake-disaggregated"] == "fallback"
    assert len(asked(running.decode)) == 1
    assert (b"[DONE]" in body) is stream


@pytest.mark.parametrize("stream", STREAMED)
@pytest.mark.parametrize("fault", ["500", "503", "reset", "timeout", "garbage", "refused"])
async def test_required_prefill_that_fails_is_an_error(start_proxy: StartProxy, fault: str, stream: bool) -> None:
    running = await with_fault(start_proxy, "prefill", fault, require_prefill=True)

    status, headers, body = await running.post({**BODY, "stream": stream})

    assert status == DECODE_STATUS[fault]
    assert headers["content-type"] == "application/json"
    assert error_of(body)
    assert asked(running.decode) == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("page", [b"<html>nginx</html>", b""], ids=["html", "empty"])
async def test_error_page_becomes_json_with_the_same_status(start_proxy: StartProxy, role: str, page: bytes) -> None:
    running = await start_proxy()
    getattr(running, role).behaviour = answer(404, page, "text/html")

    status, headers, body = await running.post(BODY)

    assert status == 404
    assert headers["content-type"] == "application/json"
    assert error_of(body)["code"] == f"{role}_status"


async def test_own_key_refused_by_an_instance_is_not_the_clients_fault(start_proxy: StartProxy) -> None:
    running = await start_proxy(upstream_key="wrong", prefill=answer(401, b'{"error":"Unauthorized"}'))

    status, _, body = await running.post(BODY)

    assert status == 502
    assert error_of(body)["code"] == "upstream_key_refused"
    assert b"wrong" not in body


async def test_answer_that_is_cut_in_the_middle_never_looks_whole(start_proxy: StartProxy) -> None:
    async def half(*args: Any) -> None:
        args[2].write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        backend.reset_now(args[2])

    running = await start_proxy(decode=half)

    status, _, body = await running.post(BODY)

    assert status == 502
    assert error_of(body)["code"] == "decode_reset"


async def test_no_pair_up_is_told_at_once(start_proxy: StartProxy) -> None:
    running = await start_proxy()
    await running.prefill.stop()
    await running.decode.stop()

    first = await running.post(BODY)
    status, headers, body = await running.post(BODY)

    assert first[0] == status == 503
    assert headers["retry-after"] == "1"
    assert error_of(body)["code"] == "no_pair_available"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/nothing", 404), ("GET", "/nothing", 404), ("OPTIONS", "/health", 405)],
)
async def test_wrong_path_or_method_is_json(start_proxy: StartProxy, method: str, path: str, status: int) -> None:
    running = await start_proxy()

    async with running.client.request(method, running.url + path) as response:
        body = await response.read()

    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    assert error_of(body)["code"] == f"http_{status}"


async def test_body_above_the_limit_is_refused(start_proxy: StartProxy) -> None:
    running = await start_proxy(limits=replace(PATIENT.limits, body_bytes=1000))

    status, headers, body = await running.post({**BODY, "prompt": "x" * 2000})

    assert status == 413
    assert error_of(body)["code"] == "request_too_large"
    assert running.prefill.posts() == []
