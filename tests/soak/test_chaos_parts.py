"""The chaos soak can fail: what it measures with finds wrong answers, late ones, losses, and what was left behind."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Iterator

import pytest
from aiohttp import web

from tests.soak.chaos.asks import Ask, make_bodies
from tests.soak.chaos.cable import Cable, CableState
from tests.soak.chaos.chaos import Outage
from tests.soak.chaos.load import EQUAL, FAILED, LATE, WRONG, Load, Outcome, ask_each_once
from tests.soak.chaos.report import Result
from tests.soak.chaos.resources import INSTANCE_PLATEAU_BYTES, Held, Resources, differences

MIB = 1 << 20
BEFORE = Resources(
    parts={"proxy": Held(1, 40 * MIB, 20), "decode": Held(3, 800 * MIB, 100)},
    pools=[100, 100],
    keys=["mooncake/ram/a", "mooncake/ram/b"],
)
AFTERWARDS: dict[str, Resources] = {
    "proxy: 40 MiB": replace(BEFORE, parts={**BEFORE.parts, "proxy": Held(1, 60 * MIB, 20)}),
    "decode: 800 MiB": replace(BEFORE, parts={**BEFORE.parts, "decode": Held(3, INSTANCE_PLATEAU_BYTES + 1, 100)}),
    "decode: 100 descriptors": replace(BEFORE, parts={**BEFORE.parts, "decode": Held(3, 800 * MIB, 117)}),
    "decode: 3 processes": replace(BEFORE, parts={**BEFORE.parts, "decode": Held(4, 800 * MIB, 100)}),
    "proxy: 1 processes": replace(BEFORE, parts={"decode": Held(3, 800 * MIB, 100)}),
    "pools": replace(BEFORE, pools=[100, 100, 100]),
    "metadata keys": replace(BEFORE, keys=["mooncake/ram/a"]),
    "/dev/shm": replace(BEFORE, shared=["psm_1"]),
    "processes of no part": replace(BEFORE, strays=["zombie "]),
}


@pytest.mark.parametrize(("what", "after"), AFTERWARDS.items(), ids=AFTERWARDS)
def test_what_is_left_behind_is_found(what: str, after: Resources) -> None:
    found = differences(BEFORE, after)

    assert len(found) == 1
    assert found[0].startswith(what)
    assert differences(BEFORE, BEFORE) == []


def judged(*outcomes: Outcome) -> list[str]:
    """The problems of a load with these outcomes, of which decode was away between seconds 10 and 20."""
    load: Any = SimpleNamespace(counts=Counter({EQUAL: 1}), seconds=[1.0], noteworthy=list(outcomes))
    supervisor = SimpleNamespace(restarts=Counter())
    chaos: Any = SimpleNamespace(struck=Counter(), supervisor=supervisor, excuses=Outage(10.0, 20.0).touches)
    result = Result(7, True)
    result.add_load(load, chaos)
    return result.problems


def test_a_failed_request_is_excused_only_while_decode_is_away() -> None:
    assert judged(Outcome(FAILED, 1, 5.0, 10.5, "503"), Outcome(FAILED, 1, 19.0, 25.0, "503")) == []
    assert len(judged(Outcome(FAILED, 1, 5.0, 9.0, "503"))) == 1
    assert len(judged(Outcome(FAILED, 1, 21.0, 22.0, "503"))) == 1


@pytest.mark.parametrize("kind", [WRONG, LATE])
def test_nothing_excuses_a_wrong_or_a_late_answer(kind: str) -> None:
    assert len(judged(Outcome(kind, 1, 11.0, 12.0, "another text"))) == 1


ANSWER = {
    "choices": [{"index": 0, "text": "ab", "finish_reason": "length", "logprobs": None}],
    "usage": {"completion_tokens": 2},
}
EXPECTED: list[Any] = [["ab", "length", None], ANSWER["usage"]]
EVENTS = [
    '{"choices": [{"index": 0, "text": "a", "finish_reason": null}]}',
    '{"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}',
    "[DONE]",
]


async def serve(request: web.Request) -> web.StreamResponse:
    """Answers a prompt [1] as expected; [2] with the end of the answer missing; [3] with an error."""
    body = await request.json()
    (what,) = body["prompt"]
    if what == 3:
        return web.json_response({"error": "x"}, status=503)
    if not body.get("stream"):
        choices = ANSWER["choices"] if what == 1 else [{**ANSWER["choices"][0], "text": "a"}]  # type: ignore[index]
        return web.json_response({**ANSWER, "choices": choices})
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in EVENTS if what == 1 else EVENTS[::2]:
        await response.write(f"data: {event}\n\n".encode())
    return response


@pytest.mark.parametrize(("what", "kind"), [(1, EQUAL), (2, WRONG), (3, FAILED)])
async def test_every_answer_is_compared_whether_streamed_or_not(what: int, kind: str) -> None:
    application = web.Application()
    application.router.add_post("/v1/completions", serve)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    asks = [Ask({"prompt": [what]}, EXPECTED)] * 2

    load = Load([url], asks, clients=2, seed="x", aborts=False).start()
    once = await ask_each_once(url, asks, clients=2)
    deadline_s = time.monotonic() + 60
    while sum(load.counts.values()) < 2 and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(load.stop)
    await runner.cleanup()

    assert set(load.counts) == {kind}
    assert len(once) == (0 if kind == EQUAL else 2)


def test_prompts_are_those_of_the_seed_and_have_all_lengths() -> None:
    bodies = make_bodies("m", "load-7", 200)

    assert bodies == make_bodies("m", "load-7", 200) != make_bodies("m", "load-8", 200)
    lengths = [len(body["prompt"]) for body in bodies]
    assert min(lengths) < 4 and max(lengths) > 2000 and max(lengths) <= 3000


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket, Cable]]:
    """Two hosts' ends of a cable, and the cable."""
    near, near_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (near, near_end, far, far_end):
        each.setblocking(False)
    yield near, far, Cable((near_end.fileno(), far_end.fileno()), seed=7)
    for each in (near, near_end, far, far_end):
        each.close()


def passed(ends: tuple[socket.socket, socket.socket, Cable], state: CableState, packets: int = 50) -> int:
    """How many of the packets arrive at once."""
    near, far, cable = ends
    cable.state = state
    near_end = next(iter(cable._other))
    for number in range(packets):
        near.send(bytes([number]))
    cable._carry(near_end)
    cable._deliver()
    arrived = 0
    with pytest.raises(BlockingIOError):
        while far.recv(10):
            arrived += 1
    return arrived


def test_the_cable_passes_cuts_loses_and_delays(ends: tuple[socket.socket, socket.socket, Cable]) -> None:
    assert passed(ends, CableState()) == 50
    assert passed(ends, CableState(up=False)) == 0
    assert 0 < passed(ends, CableState(loss=0.5)) < 50
    assert passed(ends, CableState(delay_ms=3_600_000.0)) == 0
    assert ends[2]._wait_ms() > 3_000_000.0  # type: ignore[operator]
