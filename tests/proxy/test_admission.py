"""What happens when more comes than fits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from tests.proxy.backend import Received, like_vllm, silence
from tests.proxy.conftest import PATIENT, Running, StartProxy, eventually

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


class Gate:
    """A backend's behaviour that answers when the gate opens, and counts how many stand before it."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.inside = 0
        self.most = 0

    async def __call__(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self.opened.wait()
        self.inside -= 1
        await like_vllm(received, reader, writer)


async def test_requests_above_the_limit_wait_in_line_and_prefill_waits_with_them(start_proxy: StartProxy) -> None:
    gate = Gate()
    running = await start_proxy(decode=gate, limits=replace(PATIENT.limits, pair_requests=2))

    posts = [asyncio.ensure_future(running.post(BODY)) for _ in range(6)]
    await eventually(lambda: len(running.proxy.balancer.queue) == 4 and gate.inside == 2)
    prefills_before = len(running.prefill.posts())
    gate.opened.set()
    answers = await asyncio.gather(*posts)

    assert prefills_before == 2
    assert {status for status, _, _ in answers} == {200}
    assert gate.most == 2


async def test_full_line_is_told_at_once_with_retry_after(start_proxy: StartProxy) -> None:
    gate = Gate()
    limits = replace(PATIENT.limits, pair_requests=1, queue_requests=1)
    running = await start_proxy(decode=gate, limits=limits)
    posts = [asyncio.ensure_future(running.post(BODY)) for _ in range(2)]
    await eventually(lambda: len(running.proxy.balancer.queue) == 1)

    status, headers, body = await running.post(BODY)
    gate.opened.set()
    answers = await asyncio.gather(*posts)

    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert b"proxy_overloaded" in body
    assert {status for status, _, _ in answers} == {200}


async def test_wait_in_line_has_an_end(start_proxy: StartProxy) -> None:
    gate = Gate()
    limits = replace(PATIENT.limits, pair_requests=1, queue_s=0.3)
    running = await start_proxy(decode=gate, limits=limits)
    first = asyncio.ensure_future(running.post(BODY))
    await eventually(lambda: gate.inside == 1)

    start = time.monotonic()
    status, headers, body = await running.post(BODY)
    took_s = time.monotonic() - start
    gate.opened.set()

    assert status == 503
    assert "retry-after" in headers
    assert b"queue_timeout" in body
    assert 0.25 < took_s < 10
    assert (await first)[0] == 200


async def test_prefill_legs_have_a_limit_of_their_own(start_proxy: StartProxy) -> None:
    gate = Gate()
    running = await start_proxy(prefill=gate, limits=replace(PATIENT.limits, pair_prefills=3))
    posts = [asyncio.ensure_future(running.post(BODY)) for _ in range(8)]
    await eventually(lambda: gate.inside == 3)

    gate.opened.set()
    answers = await asyncio.gather(*posts)

    assert gate.most == 3
    assert {status for status, _, _ in answers} == {200}


async def kv_tokens(running: Running) -> int:
    return running.proxy.balancer.pairs["pair-0"].kv_tokens


async def test_kv_that_decode_has_not_taken_stays_below_its_budget(start_proxy: StartProxy) -> None:
    gate = Gate()
    running = await start_proxy(decode=gate, limits=replace(PATIENT.limits, pair_kv_tokens=100))
    posts = [asyncio.ensure_future(running.post({**BODY, "prompt": [1] * 40})) for _ in range(5)]
    await eventually(lambda: gate.inside == 2)
    held = await kv_tokens(running)

    gate.opened.set()
    answers = await asyncio.gather(*posts)

    assert held == 80
    assert gate.most == 2
    assert {status for status, _, _ in answers} == {200}
    assert await kv_tokens(running) == 0


async def test_prompt_above_the_whole_kv_budget_is_served_alone(start_proxy: StartProxy) -> None:
    running = await start_proxy(limits=replace(PATIENT.limits, pair_kv_tokens=100))

    status, _, _ = await running.post({**BODY, "prompt": [1] * 1000})

    assert status == 200


async def test_long_streams_leave_room_for_probes_and_metrics(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=silence)
    streams = [asyncio.ensure_future(running.post({**BODY, "stream": True})) for _ in range(200)]
    await eventually(lambda: len(running.decode.posts()) == 200)

    async with running.client.get(running.url + "/metrics") as response:
        text = await response.text()
    state = running.proxy.balancer.pairs["pair-0"].decode.state

    assert 'mooncake_v0_proxy_pair_requests{pair="pair-0"} 200.0' in text
    assert state == "up"
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await eventually(lambda: running.proxy.balancer.inflight == 0)
