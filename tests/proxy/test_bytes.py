"""Decode gets the client's bytes, the client gets decode's."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from typing import Any

import pytest
from yarl import URL

from tests.proxy.backend import EVENT_STREAM_HEAD, Received, answer, chunk, response
from tests.proxy.conftest import StartProxy

BODIES = 1000
AT_ONCE = 50
MIB = 1024 * 1024


def odd_text(chance: random.Random) -> str:
    """Text of all planes, with what JSON must escape, and lone surrogates."""
    pieces = ["hello", "ärger", "数据", "🦊", '"', "\\", "\u2028", "\x00", "\ud83e", "\n", " " * 5, "\ufeff"]
    return "".join(chance.choice(pieces) for _ in range(chance.randrange(12)))


def odd_body(number: int) -> bytes:
    """A request body in one of the many spellings of JSON; some are no valid request, and vLLM's to refuse."""
    chance = random.Random(number)
    prompt: Any = chance.choice(
        [odd_text(chance), [1, 2, 3], [[1], [2, 3]], [odd_text(chance)], chance.randrange(10**40), None, []]
    )
    content: Any = chance.choice([odd_text(chance), [{"type": "text", "text": odd_text(chance)}], None, {"x": [[]]}])
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "messages": [{"role": "user", "content": content}],
        "seed": chance.randrange(-(10**30), 10**30),
        "n": chance.choice([1, 2, "3", 1.0, None, True, -5, [], 10**400]),
        "max_tokens": chance.choice([1, 16, 0, None, "8", 1e3, "x"]),
        "stream": chance.choice([True, False, None, "yes", 1]),
        "stop": chance.choice(["", ["a", "b"], None]),
    }
    kept = dict(chance.sample(sorted(fields.items(), key=lambda item: item[0]), chance.randrange(3, len(fields))))
    text = json.dumps(kept, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1]))
    if chance.random() < 0.2:
        text = text[:-1] + f', "model": "twice", "temperature": 1e{chance.randrange(300, 500)}}}'
    if chance.random() < 0.05:
        text = text[: len(text) // 2]
    return text.encode("utf-8", "surrogatepass")


async def echo(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Give the body back, so that one look at the client sees both directions."""
    writer.write(response(200, received.body, "application/json", "x-decode: 1\r\n"))


async def test_a_thousand_odd_bodies_pass_through_unchanged_both_ways(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=echo)
    bodies = [odd_body(number) for number in range(BODIES)]
    places = asyncio.Semaphore(AT_ONCE)

    async def send(number: int) -> tuple[int, bytes]:
        path = ("/v1/completions", "/v1/chat/completions")[number % 2]
        async with places:
            status, _, body = await running.post(bodies[number], path)
        return status, body

    answers = await asyncio.gather(*(send(number) for number in range(BODIES)))

    assert [n for n, (status, body) in enumerate(answers) if status != 200 or body != bodies[n]] == []
    assert len(running.decode.posts()) == BODIES
    assert 300 < len(running.prefill.posts()) < BODIES  # most are requests, some are vLLM's to refuse


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_prompt_of_20_mib_passes_through_unchanged(start_proxy: StartProxy, path: str) -> None:
    running = await start_proxy(decode=echo)
    text = "wörter " * (20 * MIB // 8)
    fields = {"model": "tiny", "prompt": text} if path == "/v1/completions" else {"messages": [{"content": text}]}
    sent = json.dumps(fields, ensure_ascii=False).encode()

    status, _, body = await running.post(sent, path)

    assert status == 200
    assert body == sent
    assert running.prefill.posts()[0].json == {**fields, "max_tokens": 1}


async def test_status_content_type_and_headers_of_decode_are_kept(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=answer(200, b'{"a":1}\n', "application/json; charset=x", "x-extra: é\r\n"))

    status, headers, body = await running.post({"model": "tiny", "prompt": "x"})

    assert (status, body) == (200, b'{"a":1}\n')
    assert headers["content-type"] == "application/json; charset=x"
    assert headers["content-length"] == "8"
    assert headers["x-extra"].encode("utf-8", "surrogateescape") in ("é".encode("latin-1"), "é".encode())


async def test_compressed_answer_stays_compressed(start_proxy: StartProxy) -> None:
    packed = gzip.compress(b'{"a":1}')
    running = await start_proxy(decode=answer(200, packed, extra="content-encoding: gzip\r\n"))

    _, headers, body = await running.post({"model": "tiny", "prompt": "x"}, headers={"accept-encoding": "gzip"})

    assert body == packed
    assert headers["content-encoding"] == "gzip"
    assert running.decode.posts()[0].headers["accept-encoding"] == "gzip"


async def test_client_headers_reach_both_legs_without_those_of_the_connection(start_proxy: StartProxy) -> None:
    running = await start_proxy()
    sent = {
        "Authorization": "Bearer client-key",
        "X-Request-Id": "mine-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "TE": "trailers",
        "Connection": "keep-alive, X-Secret-Hop",
        "X-Secret-Hop": "1",
        "X-Mine": "yes",
    }

    _, headers, _ = await running.post({"model": "tiny", "prompt": "x"}, headers=sent)

    assert headers["x-request-id"] == "mine-1"
    for leg in (running.prefill.posts()[0], running.decode.posts()[0]):
        assert leg.headers["authorization"] == "Bearer client-key"
        assert leg.headers["x-request-id"] == "mine-1"
        assert leg.headers["traceparent"] == sent["traceparent"]
        assert leg.headers["x-mine"] == "yes"
        assert "te" not in leg.headers
        assert "x-secret-hop" not in leg.headers


async def test_no_authorization_is_invented(start_proxy: StartProxy) -> None:
    running = await start_proxy()

    await running.post({"model": "tiny", "prompt": "x"})

    assert "authorization" not in running.prefill.posts()[0].headers
    assert "authorization" not in running.decode.posts()[0].headers


@pytest.mark.parametrize("cut", range(1, 60, 7))
async def test_stream_is_byte_identical_wherever_its_pieces_are_cut(start_proxy: StartProxy, cut: int) -> None:
    whole = b'data: {"a":"1"}\n\ndata: {"b":"\xc3\xa9"}\r\n\r\n: comment\n\ndata: {"c":3}\n\ndata: [DONE]\n\n'

    async def pieces(received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_STREAM_HEAD)
        for start in range(0, len(whole), cut):
            writer.write(chunk(whole[start : start + cut]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    running = await start_proxy(decode=pieces)

    status, headers, body = await running.post({"model": "tiny", "prompt": "x", "stream": True})

    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert body == whole


async def test_query_reaches_decode_as_written(start_proxy: StartProxy) -> None:
    running = await start_proxy()

    url = URL(running.url + "/v1/completions?a=%2F&b=1", encoded=True)
    async with running.client.post(url, json={"model": "tiny", "prompt": "x"}) as response:
        assert response.status == 200

    assert running.decode.posts()[0].target == "/v1/completions?a=%2F&b=1"
