"""Decode's leg is sent together with prefill's where the pair can take it, and nothing is lost where it cannot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from mooncake_v0.handoff import HEADER, parse_handoff
from tests.proxy import backend
from tests.proxy.backend import COMPLETION, Received, agent_metrics, answer, like_vllm, response, vllm_error
from tests.proxy.conftest import HURRIED, Running, StartProxy, eventually

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


class Instances:
    """Behaviours of a pair whose prefill answers when it is told to, and whose decode holds what is sent early."""

    def __init__(self, status: int = 200) -> None:
        self.prefill_may_answer = asyncio.Event()
        self.status = status

    async def prefill(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.prefill_may_answer.wait()
        body = COMPLETION if self.status == 200 else vllm_error(self.status)
        writer.write(response(self.status, body))

    async def decode(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if HEADER in received.headers:
            gone = asyncio.ensure_future(reader.read(1))
            free = asyncio.ensure_future(self.prefill_may_answer.wait())
            done, _ = await asyncio.wait([gone, free], return_when=asyncio.FIRST_COMPLETED)
            if self.status != 200:
                done = {gone}
                await gone
            if gone in done:
                received.gone.set()
                return
            gone.cancel()
        await like_vllm(received, reader, writer)


async def start(start_proxy: StartProxy, instances: Instances, **changes: Any) -> Running:
    return await start_proxy(early=True, prefill=instances.prefill, decode=instances.decode, **changes)


async def both_legs(running: Running) -> tuple[Received, Received]:
    await eventually(lambda: bool(running.prefill.posts() and running.decode.posts()))
    return running.prefill.posts()[0], running.decode.posts()[0]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "sse"])
async def test_both_legs_are_sent_at_once_as_one_handoff(start_proxy: StartProxy, stream: bool) -> None:
    instances = Instances()
    running = await start(start_proxy, instances)
    request = asyncio.ensure_future(running.post({**BODY, "stream": stream}))

    prefill, decode = await both_legs(running)
    handoff = parse_handoff(decode.headers[HEADER])
    instances.prefill_may_answer.set()
    status, headers, body = await request

    assert handoff is not None and handoff.within_s > 30
    assert prefill.headers[HEADER] == decode.headers[HEADER]
    assert decode.json == {**BODY, "stream": stream}
    assert (status, headers["x-mooncake-disaggregated"]) == (200, "yes")
    assert body.endswith(b"data: [DONE]\n\n") if stream else body == COMPLETION
    assert len(running.decode.posts()) == 1
    assert running.log_lines()[0]["early"] is True


async def test_each_request_is_a_handoff_of_its_own(start_proxy: StartProxy) -> None:
    running = await start_proxy(early=True)

    for _ in range(5):
        await running.post(BODY)

    assert len({one.headers[HEADER] for one in running.decode.posts()}) == 5


@pytest.mark.parametrize(
    "metrics",
    {
        "no plugin": (b"vllm:num_requests_running 0.0\n", b""),
        "decode of another pair": (agent_metrics("aa", "bb"), agent_metrics("cc", "aa")),
        "prefill of another pair": (agent_metrics("aa", "cc"), agent_metrics("bb", "aa")),
        "only prefill": (agent_metrics("aa", "bb"), b""),
    }.items(),
    ids=lambda item: item[0],
)
async def test_a_pair_that_does_not_say_so_gets_one_leg_after_the_other(start_proxy: StartProxy, metrics: Any) -> None:
    running = await start_proxy()
    running.prefill.metrics, running.decode.metrics = metrics[1]
    pair = running.proxy.balancer.pairs["pair-0"]
    before = running.prefill.gets + running.decode.gets
    await eventually(lambda: running.prefill.gets + running.decode.gets > before + 60)

    assert not pair.hands_off_early
    assert (await running.post(BODY))[0] == 200
    assert all(HEADER not in one.headers for one in (*running.prefill.posts(), *running.decode.posts()))


async def test_a_pair_is_found_out_later_forgotten_when_an_instance_goes_and_found_again(
    start_proxy: StartProxy,
) -> None:
    running = await start_proxy()
    pair = running.proxy.balancer.pairs["pair-0"]
    running.prefill.metrics, running.decode.metrics = agent_metrics("aa", "bb"), agent_metrics("bb", "aa")

    await eventually(lambda: pair.hands_off_early)
    await running.decode.stop()
    await eventually(lambda: not pair.hands_off_early)

    running.prefill.metrics, running.decode.metrics = agent_metrics("aa", "cc"), agent_metrics("cc", "aa")
    await running.decode.start(running.decode.port)
    await eventually(lambda: pair.hands_off_early)


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ({**BODY, "prompt": ["one", "two"]}, {}),
        ({**BODY, "prompt": [[1, 2], [3]]}, {}),
        ({**BODY, "prompt_logprobs": 1}, {}),
        (BODY, {"early_decode": False}),
    ],
    ids=["list of texts", "list of ids", "not from KV", "switched off"],
)
async def test_requests_that_are_not_one_handoff_are_not_sent_early(
    start_proxy: StartProxy, body: dict[str, Any], changes: dict[str, Any]
) -> None:
    running = await start_proxy(**changes)
    pair = running.proxy.balancer.pairs["pair-0"]
    pair.prefill.agents, pair.decode.agents = ("aa", "bb"), ("bb", "aa")

    status, _, _ = await running.post(body)

    assert status == 200
    assert all(HEADER not in one.headers for one in running.decode.posts())


async def test_the_header_is_the_proxys_alone(start_proxy: StartProxy) -> None:
    running = await start_proxy()

    await running.post(BODY, headers={HEADER: "00" * 16 + ";within=60"})

    assert all(HEADER not in one.headers for one in (*running.prefill.posts(), *running.decode.posts()))


async def test_a_failed_prefill_takes_the_early_leg_back_and_decode_serves_alone(start_proxy: StartProxy) -> None:
    instances = Instances(status=500)
    running = await start(start_proxy, instances)
    request = asyncio.ensure_future(running.post(BODY))
    _, early = await both_legs(running)
    instances.prefill_may_answer.set()

    status, headers, body = await request

    assert (status, headers["x-mooncake-disaggregated"], body) == (200, "fallback", COMPLETION)
    await asyncio.wait_for(early.gone.wait(), 10)
    assert [HEADER in one.headers for one in running.decode.posts()] == [True, False]


async def test_a_refusal_of_prefill_takes_the_early_leg_back(start_proxy: StartProxy) -> None:
    instances = Instances(status=404)
    running = await start(start_proxy, instances)
    request = asyncio.ensure_future(running.post(BODY))
    _, early = await both_legs(running)
    instances.prefill_may_answer.set()

    status, _, body = await request

    assert (status, body) == (404, vllm_error(404))
    await asyncio.wait_for(early.gone.wait(), 10)
    assert len(running.decode.posts()) == 1


async def test_a_late_prefill_takes_the_early_leg_back(start_proxy: StartProxy) -> None:
    instances = Instances()
    running = await start(start_proxy, instances, timeouts=HURRIED)

    status, headers, _ = await running.post(BODY)

    assert (status, headers["x-mooncake-disaggregated"]) == (200, "fallback")
    await asyncio.wait_for(running.decode.posts()[0].gone.wait(), 10)


async def test_a_client_that_leaves_takes_both_legs_back(start_proxy: StartProxy) -> None:
    instances = Instances()
    running = await start(start_proxy, instances)
    request = asyncio.ensure_future(running.post(BODY))
    _, early = await both_legs(running)

    request.cancel()

    await asyncio.wait_for(early.gone.wait(), 10)
    await eventually(lambda: running.proxy.balancer.inflight == 0)


async def test_an_early_leg_that_broke_is_sent_again(start_proxy: StartProxy) -> None:
    instances = Instances()

    async def breaks_early(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if HEADER in received.headers:
            backend.reset_now(writer)
            return
        await like_vllm(received, reader, writer)

    running = await start_proxy(early=True, prefill=instances.prefill, decode=breaks_early)
    request = asyncio.ensure_future(running.post(BODY))
    await both_legs(running)
    instances.prefill_may_answer.set()

    assert await request == (200, (await request)[1], COMPLETION)
    assert len(running.decode.posts()) == 2
    assert running.log_lines()[0]["attempts"] == 1


async def test_an_early_stream_that_breaks_before_its_first_event_moves(start_proxy: StartProxy) -> None:
    async def breaks_early(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if HEADER in received.headers and len(running.decode.posts()) == 1:
            writer.write(backend.EVENT_STREAM_HEAD)
            await writer.drain()
            backend.reset_now(writer)
            return
        await like_vllm(received, reader, writer)

    running = await start_proxy(early=True, decode=breaks_early)

    status, _, body = await running.post({**BODY, "stream": True})

    assert status == 200 and body.endswith(b"data: [DONE]\n\n")


async def test_early_refusal_of_decode_is_the_answer(start_proxy: StartProxy) -> None:
    running = await start_proxy(early=True, decode=answer(400, vllm_error(400)))

    status, _, body = await running.post(BODY)

    assert (status, body) == (400, vllm_error(400))
    assert len(running.decode.posts()) == 1


async def test_no_connection_is_left_after_many_early_legs_were_dropped(start_proxy: StartProxy) -> None:
    running = await start(start_proxy, Instances(status=500), retries=0, require_prefill=True)
    running.proxy.balancer.pairs["pair-0"].prefill.health = replace(running.proxy.settings.health, eject_failures=10**6)

    async def fail_when_decode_has_it(received: Received, *connection: Any) -> None:
        await eventually(lambda: len(running.decode.posts()) >= len(running.prefill.posts()))
        await answer(500, vllm_error(500))(received, *connection)

    running.prefill.behaviour = fail_when_decode_has_it

    statuses = [(await running.post(BODY))[0] for _ in range(50)]

    assert set(statuses) == {500}
    assert [HEADER in one.headers for one in running.decode.posts()] == [True] * 50
    await eventually(lambda: all(one.gone.is_set() for one in running.decode.posts()))
    connector = running.proxy.upstream.requests.connector if running.proxy.upstream else None
    assert isinstance(connector, aiohttp.TCPConnector) and not connector._acquired
