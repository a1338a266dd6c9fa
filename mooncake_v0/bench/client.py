"""A client of the OpenAI completions API that notes when each token came. Used by `serve`; one session a run."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Sequence

import aiohttp

from mooncake_v0.errors import CouldNotCheckError

_CONNECT_S = 10.0
_KEEP_ALIVE_S = 3.0  # vLLM's server closes a connection that has been idle for 5 s, with a request on its way perhaps


@dataclass(frozen=True)
class Prompt:
    """Token ids, so that its length is exact whatever the tokenizer."""

    token_ids: Sequence[int]
    output_tokens: int


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times in seconds; gaps_s between consecutive pieces; error is empty when it came to its end.

    lost_tokens: vllm 0.6.4.post1 starts one more reader of the engine's output socket for every 5 s that its start takes
    (engine/multiprocessing/client.py:258, entrypoints/openai/api_server.py:205; mended later by its pull request 10802), so
    that pieces of a stream may swap, and those behind its end be lost. Such an answer still has its latencies.
    """

    started_s: float
    ended_s: float
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    tokens: int = 0
    text: str = ""
    lost_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first."""
        return sum(self.gaps_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Client:
    """`ask` as often as wanted at once; for use as an async context manager."""

    def __init__(self, url: str, *, timeout_s: float, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.model = ""
        self.max_tokens: int | None = None

    async def __aenter__(self) -> Client:
        # every request at once at most; a pool limit would hide the queue from the figures
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        try:
            await self._read_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(self, prompt: Prompt) -> Answer:
        """Stream one completion of exactly output_tokens tokens. What goes wrong is in the answer's error."""
        body = {
            "model": self.model,
            "prompt": list(prompt.token_ids),
            "max_tokens": prompt.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = time.perf_counter()
        try:
            async with self._session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    return Answer(started_s, time.perf_counter(), error=f"status {response.status}: {text}")
                return await _read_stream(response, started_s, prompt.output_tokens)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            return Answer(started_s, time.perf_counter(), error=_words(error))

    async def _read_model(self) -> None:
        try:
            async with self._session.get(f"{self.url}/v1/models") as response:
                if response.status != 200:
                    raise CouldNotCheckError(
                        f"{self.url}/v1/models answers with status {response.status}",
                        fix="give the URL of an OpenAI server, without /v1; with --api-key where it wants one",
                    )
                card: dict[str, Any] = (await response.json())["data"][0]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise CouldNotCheckError(
                f"{self.url} does not answer: {_words(error)}", fix="start it, or correct the URL"
            ) from error
        except (ValueError, LookupError, TypeError) as error:
            raise CouldNotCheckError(
                f"{self.url}/v1/models does not answer with a list of models", fix="give the URL of an OpenAI server"
            ) from error
        self.model = str(card["id"])
        self.max_tokens = card.get("max_model_len")


def complete(answer: Answer, client: Client) -> Answer:
    """An answer that came to its end. Raises CouldNotCheckError for another one."""
    if answer.error:
        raise CouldNotCheckError(
            f"{client.url} did not complete a request: {answer.error}", fix="see the server's log; a longer --timeout"
        )
    return answer


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


async def _read_stream(response: aiohttp.ClientResponse, started_s: float, expected_tokens: int) -> Answer:
    """Until [DONE]; the pieces' times are taken as their lines arrive."""
    times_s: list[float] = []
    parts: list[str] = []
    tokens, done = 0, False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        now_s = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return Answer(started_s, now_s, error=str(event["error"])[:300])
        if event.get("choices"):
            times_s.append(now_s)
            parts.append(event["choices"][0]["text"])
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    ended_s = time.perf_counter()
    if not done or not tokens or not times_s:
        return Answer(started_s, ended_s, error=f"the stream broke off after {len(times_s)} pieces")
    gaps_s = tuple(after - before for before, after in zip(times_s, times_s[1:]))
    lost_tokens = expected_tokens - tokens
    return Answer(started_s, ended_s, times_s[0] - started_s, gaps_s, tokens, "".join(parts), lost_tokens)
