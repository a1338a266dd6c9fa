"""The shape of the proxy that the V0 guide prints, for comparison: Quart under Hypercorn, a client session for each leg,
the answer re-read piece by piece. Run as `python -m tests.proxy.published_pattern PORT PREFILL_URL DECODE_URL`."""

from __future__ import annotations

import sys
from typing import Any, AsyncIterator

import aiohttp
from hypercorn.asyncio import serve
from hypercorn.config import Config
from quart import Quart, make_response, request


async def pieces_of(url: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    timeout = aiohttp.ClientTimeout(total=6 * 3600)
    headers = {"Authorization": "Bearer None"}
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        if response.status == 200:
            async for piece in response.content.iter_chunked(1024):
                yield piece


def build(prefill_url: str, decode_url: str) -> Quart:
    app = Quart(__name__)

    @app.post("/v1/completions")
    async def completions() -> Any:
        body = await request.get_json()
        async for _ in pieces_of(prefill_url + "/v1/completions", {**body, "max_tokens": 1}):
            pass
        response: Any = await make_response(pieces_of(decode_url + "/v1/completions", body))
        response.timeout = None
        return response

    return app


def main() -> None:
    port, prefill_url, decode_url = sys.argv[1:]
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.accesslog = None
    import uvloop

    uvloop.run(serve(build(prefill_url, decode_url), config))


if __name__ == "__main__":
    main()
