"""The two exchanges with instances, and only these: one pooled aiohttp client for requests, one for probes.

`Upstream` lives as long as the app. Deadlines are the caller's (`guard`), apart from the time to connect. An answer of
any status is a result; only what is no answer at all is a LegError, with a kind that tells what it proves:

    refused      nothing listens there              connect      no connection in time, or no route, or no such name
    reset        the connection broke               garbage      what came is not HTTP
"""

from __future__ import annotations

import asyncio
import io
import ssl
from dataclasses import dataclass
from typing import Sequence

import aiohttp
from yarl import URL

from mooncake_v0.proxy.headers import RawHeaders
from mooncake_v0.proxy.pairs import Instance
from mooncake_v0.proxy.settings import Timeouts

# uvicorn in vLLM 0.6.4.post1 closes idle connections after 5 s (timeout_keep_alive); reusing one in that moment loses
# the request, and a POST is not repeated by the client library
KEEP_ALIVE_S = 4.0
PREFILL_ANSWER_LIMIT_BYTES = 16 * 1024 * 1024
READ_BUFFER_BYTES = 2**16
WHOLE_WRITE_BYTES = 2**20


class LegError(Exception):
    """One leg got no answer. `kind` is one of the words above, or "timeout"."""

    def __init__(self, instance: Instance, kind: str) -> None:
        super().__init__(f"{instance.role}: {kind}")
        self.instance = instance
        self.role = instance.role
        self.kind = kind


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    status: int
    headers: RawHeaders
    content_type: str
    body: bytes


def leg_error(instance: Instance, error: Exception) -> LegError:
    """What an exception of the client library says about the instance."""
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return LegError(instance, "refused")
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, asyncio.TimeoutError)):
        return LegError(instance, "connect")
    if isinstance(error, (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError, ValueError)):
        return LegError(instance, "garbage")
    return LegError(instance, "reset")


# everything that an exchange may raise: the library's own, the socket's, and what its parser lets through
EXCHANGE_ERRORS = (
    aiohttp.ClientError,
    aiohttp.http_exceptions.HttpProcessingError,
    asyncio.TimeoutError,
    OSError,
    ValueError,
)


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """The body as the client library wants it: a large one in pieces, between which the event loop runs."""
    if len(body) > WHOLE_WRITE_BYTES:
        return io.BytesIO(body)
    return body or None


class Upstream:
    """The HTTP clients of one proxy."""

    def __init__(self, timeouts: Timeouts, *, ca_file: str = "") -> None:
        self.timeouts = timeouts
        context = ssl.create_default_context(cafile=ca_file) if ca_file else None
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s)
        self.requests = self._session(timeout, context)
        # apart, so that long streams never stand in the way of probes
        self.probes = self._session(timeout, context)

    @staticmethod
    def _session(timeout: aiohttp.ClientTimeout, context: ssl.SSLContext | None) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # no limit: the balancer bounds what is in flight; aiohttp's own 100 would queue silently
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=True if context is None else context
            ),
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=READ_BUFFER_BYTES,
        )

    async def close(self) -> None:
        await self.requests.close()
        await self.probes.close()

    async def prefill(self, instance: Instance, path: str, body: bytes, headers: Sequence[tuple[str, str]]) -> Answer:
        """POST the prefill copy and read the whole answer, so that the connection is free again."""
        return await self.exchange(instance, "POST", path, body, headers)

    async def exchange(
        self, instance: Instance, method: str, path: str, body: bytes, headers: Sequence[tuple[str, str]]
    ) -> Answer:
        """One small request and its whole answer."""
        url = URL(instance.url + path, encoded=True)
        try:
            async with self.requests.request(
                method, url, data=_payload(body), headers=headers, allow_redirects=False
            ) as response:
                content = await response.content.read(PREFILL_ANSWER_LIMIT_BYTES)
                while not response.content.at_eof() and len(content) < PREFILL_ANSWER_LIMIT_BYTES:
                    content += await response.content.readany()
                return Answer(response.status, list(response.raw_headers), response.content_type, content)
        except EXCHANGE_ERRORS as error:
            raise leg_error(instance, error) from error

    async def decode(
        self, instance: Instance, target: str, body: bytes, headers: Sequence[tuple[str, str]]
    ) -> aiohttp.ClientResponse:
        """POST the client's bytes; returns when the response's headers are there. The caller closes it."""
        try:
            return await self.requests.post(
                URL(instance.url + target, encoded=True), data=_payload(body), headers=headers, allow_redirects=False
            )
        except EXCHANGE_ERRORS as error:
            raise leg_error(instance, error) from error
