"""Instances that die, freeze, start late, get stuck or misbehave, with another pair beside them or none."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from tests.proxy import backend
from tests.proxy.backend import EVENT_STREAM_HEAD, Received, answer, chunk, event, like_vllm, silence, vllm_error
from tests.proxy.conftest import PATIENT, Running, StartProxy, eventually

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
WEDGE_SOON = replace(PATIENT.timeouts, wedge_s=0.3)


class Load:
    """Clients that post one request after the other until told to stop; each with an id of its own."""

    def __init__(self, running: Running, clients: int, *, stream: bool = False) -> None:
        self.running = running
        self.statuses: list[int] = []
        self.stopped = False
        self.stream = stream
        self._tasks = [asyncio.ensure_future(self._client(number)) for number in range(clients)]

    async def _client(self, number: int) -> None:
        count = 0
        while not self.stopped:
            count += 1
            body = {**BODY, "stream": self.stream, "prompt": f"{number}-{count}"}
            status, _, _ = await self.running.post(body, headers={"x-request-id": f"r{number}-{count}"})
            self.statuses.append(status)
            await asyncio.sleep(0.002)

    async def done(self, more: int) -> None:
        """Let `more` requests be answered from now on, then end."""
        wanted = len(self.statuses) + more
        await eventually(lambda: len(self.statuses) >= wanted)
        self.stopped = True
        await asyncio.gather(*self._tasks)


def crossed(running: Running) -> list[str]:
    """Requests whose last prefill and decode went to different pairs."""
    last: dict[str, dict[str, int]] = {}
    for number, pair in enumerate(running.pairs):
        for role, instance in (("prefill", pair.prefill), ("decode", pair.decode)):
            for one in instance.posts():
                last.setdefault(one.headers.get("x-request-id", ""), {})[role] = number
    ids = {line["request_id"]: line for line in running.log_lines() if line["disaggregated"] == "yes"}
    return [
        request_id
        for request_id, line in ids.items()
        if line["attempts"] == 1 and last[request_id].get("prefill") != last[request_id].get("decode")
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "sse"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_killed_instance_loses_no_request_and_is_used_again_within_a_second(
    start_proxy: StartProxy, role: str, stream: bool
) -> None:
    running = await start_proxy(pairs=2)
    load = Load(running, 8, stream=stream)
    await eventually(lambda: len(load.statuses) > 50)
    victim = getattr(running.pairs[0], role)

    await victim.stop()
    await eventually(lambda: running.proxy.balancer.pairs["pair-0"].__dict__[role].state == "down")
    await eventually(lambda: len(load.statuses) > 150)
    before = len(victim.posts())
    await victim.start(victim.port)
    took_s = await eventually(lambda: len(victim.posts()) > before)
    await load.done(50)

    assert set(load.statuses) == {200}
    assert crossed(running) == []
    assert took_s < 2.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_frozen_instance_hands_its_waiting_requests_to_the_other_pair(start_proxy: StartProxy, role: str) -> None:
    """As after SIGSTOP: connections are accepted by the kernel, nothing answers."""
    running = await start_proxy(pairs=2, health=replace(PATIENT.health, probe_timeout_s=0.5))
    frozen = getattr(running.pairs[0], role)

    async def freeze(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silence(received, reader, writer)

    frozen.behaviour = freeze
    posts = [asyncio.ensure_future(running.post({**BODY, "prompt": str(n)})) for n in range(8)]
    await eventually(lambda: len(frozen.posts()) > 0)

    frozen._get = _never  # health too
    answers = await asyncio.wait_for(asyncio.gather(*posts), 30)

    assert {status for status, _, _ in answers} == {200}
    assert running.proxy.balancer.pairs["pair-0"].__dict__[role].state == "silent"


async def _never(target: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def test_instance_that_starts_late_is_used_as_soon_as_it_is_up(start_proxy: StartProxy) -> None:
    running = await start_proxy()
    await running.decode.stop()
    await running.prefill.stop()
    pair = running.proxy.balancer.pairs["pair-0"]
    await eventually(lambda: [one.state for one in pair.instances] == ["down", "down"])
    async with running.client.get(running.url + "/health") as response:
        assert response.status == 503

    await running.prefill.start(running.prefill.port)
    await running.decode.start(running.decode.port)
    took_s = await eventually(lambda: running.proxy.ready)

    status, headers, _ = await running.post(BODY)
    assert status == 200
    assert took_s < 2.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_wedged_instance_is_found_out_though_its_health_is_good(start_proxy: StartProxy, role: str) -> None:
    running = await start_proxy(pairs=2, timeouts=WEDGE_SOON)
    stuck = getattr(running.pairs[0], role)
    stuck.behaviour = silence
    instance = getattr(running.proxy.balancer.pairs["pair-0"], role)

    answers = await asyncio.wait_for(asyncio.gather(*(running.post({**BODY, "prompt": str(n)}) for n in range(6))), 30)
    was_wedged = instance.wedged
    stuck.behaviour = like_vllm
    await eventually(lambda: not instance.wedged)

    assert {status for status, _, _ in answers} == {200}
    assert was_wedged


async def test_slow_instance_that_proves_it_lives_is_not_called_wedged(start_proxy: StartProxy) -> None:
    async def slow_but_alive(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if received.json["prompt"] != [0]:
            await asyncio.sleep(1.5)
        await like_vllm(received, reader, writer)

    running = await start_proxy(pairs=2, decode=slow_but_alive, timeouts=WEDGE_SOON)

    status, _, _ = await running.post(BODY)

    asked_to_prove = [one for pair in running.pairs for one in pair.decode.posts() if one.json["prompt"] == [0]]
    assert status == 200
    assert asked_to_prove
    assert running.log_lines()[0]["attempts"] == 1


async def test_single_pair_is_served_within_a_second_after_a_burst_of_errors(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=answer(500, vllm_error(500)))
    bad = [(await running.post(BODY))[0] for _ in range(12)]

    running.decode.behaviour = like_vllm
    status, _, _ = await running.post(BODY)

    assert set(bad) == {500}
    assert status == 200


@pytest.mark.parametrize("status", [400, 404, 422, 429, 503])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_client_errors_and_backpressure_never_eject(start_proxy: StartProxy, role: str, status: int) -> None:
    running = await start_proxy(**{role: answer(status, vllm_error(status))})
    await asyncio.gather(*(running.post(BODY) for _ in range(20)))

    instance = getattr(running.proxy.balancer.pairs["pair-0"], role)

    assert instance.status(time.monotonic()) == "up"
    assert instance.ejections_total == 0


async def test_clients_that_leave_never_eject(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=silence)
    for _ in range(8):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(running.post(BODY), 0.05)

    assert running.proxy.balancer.pairs["pair-0"].decode.status(time.monotonic()) == "up"


async def test_misbehaving_instance_is_left_out_while_another_pair_serves(start_proxy: StartProxy) -> None:
    running = await start_proxy(pairs=2, retries=3)
    running.pairs[0].decode.behaviour = answer(500, vllm_error(500))

    statuses = [(await running.post({**BODY, "prompt": str(n)}))[0] for n in range(60)]

    decode = running.proxy.balancer.pairs["pair-0"].decode
    assert decode.status(time.monotonic()) == "ejected"
    assert len(running.pairs[0].decode.posts()) < 10
    assert statuses[20:] == [200] * 40


async def test_stream_that_has_begun_is_never_repeated(start_proxy: StartProxy) -> None:
    running = await start_proxy(pairs=2, decode=backend.first_events_then(1, backend.reset_now))

    _, _, body = await running.post({**BODY, "stream": True})

    assert b'"error"' in body
    assert sum(len(pair.decode.posts()) for pair in running.pairs) == 1


async def test_stream_that_breaks_before_its_first_event_moves(start_proxy: StartProxy) -> None:
    async def headers_only(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_STREAM_HEAD)
        await writer.drain()
        backend.reset_now(writer)

    running = await start_proxy(pairs=2)
    running.pairs[0].decode.behaviour = headers_only
    answers = [await running.post({**BODY, "prompt": str(n), "stream": True}) for n in range(4)]

    assert {status for status, _, _ in answers} == {200}
    assert all(b'"error"' not in body for _, _, body in answers)
    assert len(running.pairs[0].decode.posts()) > 0


async def test_idle_connection_closed_by_the_instance_loses_nothing(start_proxy: StartProxy) -> None:
    """The race of uvicorn's five seconds: the instance closes a connection in the moment it is used again."""

    async def answer_then_drop(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await like_vllm(received, reader, writer)
        await writer.drain()
        asyncio.get_running_loop().call_later(0.005, backend.reset_now, writer)

    running = await start_proxy(decode=answer_then_drop)
    statuses = []
    for pause_ms in range(0, 100, 2):
        statuses.append((await running.post(BODY))[0])
        await asyncio.sleep(pause_ms / 10_000)

    assert set(statuses) == {200}


async def test_both_legs_always_go_to_the_same_pair(start_proxy: StartProxy) -> None:
    running = await start_proxy(pairs=4)
    load = Load(running, 8)

    await load.done(200)

    assert crossed(running) == []
    assert all(pair.decode.posts() for pair in running.pairs)


async def test_same_prompt_goes_where_its_kv_is(start_proxy: StartProxy) -> None:
    running = await start_proxy(pairs=3)

    for _ in range(6):
        await running.post({**BODY, "prompt": "again", "temperature": 0.5})
    await running.post({**BODY, "prompt": "again", "n": 2, "seed": 7, "stream": True})

    assert sorted(len(pair.decode.posts()) for pair in running.pairs) == [0, 0, 7]


async def test_stream_reader_is_not_disturbed_by_a_dead_second_pair(start_proxy: StartProxy) -> None:
    async def slow(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_STREAM_HEAD)
        for number in range(20):
            writer.write(chunk(event(f"t{number}")))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    running = await start_proxy(pairs=2, decode=slow)
    streams = [asyncio.ensure_future(running.post({**BODY, "stream": True, "prompt": str(n)})) for n in range(4)]
    await eventually(lambda: all(pair.decode.posts() for pair in running.pairs))
    await asyncio.sleep(0.1)

    await running.pairs[0].decode.stop()
    bodies = [body for _, _, body in await asyncio.gather(*streams)]

    whole = [body for body in bodies if body.count(b"data: ") == 21 and b'"error"' not in body]
    broken = [body for body in bodies if b'"error"' in body]
    assert (len(whole), len(broken)) == (2, 2)
    assert all(json.loads(body.split(b"\n\n")[-3][6:])["error"] for body in broken)
