"""Streams that break, clients that leave or do not read, and streams that simply go on."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any, Callable

import aiohttp
import pytest

from tests.proxy.backend import (
    EVENT_STREAM_HEAD,
    Received,
    chunk,
    event,
    events,
    first_events_then,
    reset_now,
    silence,
)
from tests.proxy.conftest import PATIENT, Running, StartProxy, eventually

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "stream": True}


def events_of(body: bytes) -> list[str]:
    """The data of each event; fails on anything that is not a whole event."""
    assert body.endswith(b"\n\n")
    parts = body.decode().split("\n\n")[:-1]
    assert all(part.startswith("data: ") for part in parts)
    return [part[len("data: ") :] for part in parts]


def end_with_close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def go_silent(writer: asyncio.StreamWriter) -> None:
    """The stream just stops, its connection stays (SIGSTOP)."""
    writer.get_extra_info("socket")


@pytest.mark.parametrize("tail", [b"", b'data: {"half'], ids=["between events", "inside an event"])
@pytest.mark.parametrize("end", [reset_now, end_with_close], ids=["reset", "closed"])
async def test_decode_that_dies_in_the_stream_ends_in_an_error_event_within_a_second(
    start_proxy: StartProxy, end: Callable[[asyncio.StreamWriter], None], tail: bytes
) -> None:
    running = await start_proxy(decode=first_events_then(2, end, tail))

    start = time.monotonic()
    status, _, body = await running.post(BODY)
    took_s = time.monotonic() - start

    *good, error, done = events_of(body)
    assert status == 200
    assert took_s < 2.0
    assert [json.loads(one)["choices"][0]["text"] for one in good] == ["t0", "t1"]
    assert json.loads(error)["error"]["code"] in ("decode_broke", "decode_ended_early")
    assert done == "[DONE]"
    assert running.log_lines() == [] or running.log_lines()[0]["outcome"] == "broken"


async def test_stream_that_goes_silent_ends_in_an_error_event_after_the_idle_time(start_proxy: StartProxy) -> None:
    async def two_then_nothing(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_STREAM_HEAD + chunk(event("t0")) + chunk(event("t1")))
        await silence(received, reader, writer)

    running = await start_proxy(decode=two_then_nothing, timeouts=replace(PATIENT.timeouts, decode_idle_s=0.5))

    start = time.monotonic()
    _, _, body = await running.post(BODY)
    took_s = time.monotonic() - start

    *good, error, done = events_of(body)
    assert len(good) == 2
    assert json.loads(error)["error"]["code"] == "decode_timeout"
    assert done == "[DONE]"
    assert 0.45 < took_s < 10


async def test_stream_that_ends_in_good_order_but_too_early_ends_in_an_error_event(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=events(2, ending=b""))

    _, _, body = await running.post(BODY)

    assert json.loads(events_of(body)[2])["error"]["code"] == "decode_ended_early"


async def test_openai_client_raises_when_decode_dies_in_the_stream(start_proxy: StartProxy) -> None:
    openai = pytest.importorskip("openai")
    running = await start_proxy(decode=first_events_then(2, reset_now))
    client = openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="k", max_retries=0)
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)

    with pytest.raises(openai.APIError, match="decode instance broke off"):
        _ = [piece async for piece in stream]
    await client.close()


async def leave_when(running: Running, happened: Callable[[], bool], body: dict[str, Any]) -> float:
    """Post, leave once something has happened; the moment of leaving on the monotonic clock."""
    posting = asyncio.ensure_future(running.post(body))
    await eventually(happened)
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)
    return time.monotonic()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_client_that_leaves_ends_the_running_leg_at_once(
    start_proxy: StartProxy, role: str, stream: bool
) -> None:
    running = await start_proxy(**{role: silence})
    instance = getattr(running, role)

    left = await leave_when(running, lambda: bool(instance.posts()), {**BODY, "stream": stream})
    await asyncio.wait_for(instance.posts()[0].gone.wait(), 5)
    took_s = time.monotonic() - left

    await eventually(lambda: len(running.log_lines()) == 1)
    line = running.log_lines()[0]
    assert took_s < 1.0
    assert (line["outcome"], line["status"], line["phase"]) == ("client_gone", 499, role)
    assert running.proxy.balancer.inflight == 0
    assert role == "decode" or running.decode.posts() == []


async def test_client_that_leaves_the_queue_gives_up_its_place_in_line(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=silence, limits=replace(PATIENT.limits, pair_requests=1))
    first = asyncio.ensure_future(running.post(BODY))
    await eventually(lambda: len(running.decode.posts()) == 1)

    await leave_when(running, lambda: len(running.proxy.balancer.queue) == 1, BODY)

    await eventually(lambda: len(running.proxy.balancer.queue) == 0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await eventually(lambda: running.proxy.balancer.inflight == 0)


async def test_client_that_does_not_read_is_held_back_and_harms_nobody(start_proxy: StartProxy) -> None:
    sent_bytes = 0
    big_event = b"data: " + b"x" * 100_000 + b"\n\n"

    async def flood(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        writer.write(EVENT_STREAM_HEAD)
        for _ in range(1000):
            writer.write(chunk(big_event))
            await writer.drain()
            sent_bytes += len(big_event)

    running = await start_proxy(decode=flood, timeouts=replace(PATIENT.timeouts, client_stall_s=1.0, wedge_s=60.0))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rsplit(":", 1)[1]), limit=2**16)
    body = json.dumps(BODY).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)

    await eventually(lambda: len(running.log_lines()) == 1)
    writer.close()

    line = running.log_lines()[0]
    assert (line["outcome"], line["error"]) == ("client_gone", "client_stalled")
    assert 0 < sent_bytes < 16 * 1024 * 1024
    assert running.proxy.balancer.inflight == 0


async def test_events_are_passed_on_as_they_come(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=events(5, pause_s=0.1))
    arrivals: list[float] = []

    async with running.client.post(
        running.url + "/v1/completions", json=BODY, timeout=aiohttp.ClientTimeout(total=30)
    ) as response:
        async for _ in response.content.iter_any():
            arrivals.append(time.monotonic())

    assert len(arrivals) >= 5
    assert arrivals[4] - arrivals[0] > 0.3
