"""Decode's leg of a request, sent together with prefill's: what a decode does before it needs the KV then costs no time.

Decode holds the request until prefill's KV is there or prefill's leg has ended (`mooncake_v0.handoff`). The leg is one that
nobody has to use: when prefill fails it is dropped, and when it could not be sent decode is asked again, for certain.
"""

from __future__ import annotations

import asyncio
import math
import os

import aiohttp

from mooncake_v0.handoff import HEADER, ID_BYTES, Handoff
from mooncake_v0.proxy.job import Job
from mooncake_v0.proxy.legs import Upstream
from mooncake_v0.proxy.pairs import Instance

SLACK_S = 5  # decode waits longer than the proxy does for prefill, so that the proxy decides


class EarlyLeg:
    """Sent when it is made. prefill_s: how long prefill's leg may take."""

    def __init__(self, upstream: Upstream, job: Job, decode: Instance, prefill_s: float) -> None:
        handoff = Handoff(os.urandom(ID_BYTES), math.ceil(prefill_s) + SLACK_S)
        self.headers = [(HEADER, handoff.header())]  # of both legs
        self._task = asyncio.ensure_future(upstream.decode(decode, job.target, job.body, [*job.headers, *self.headers]))

    async def response(self) -> aiohttp.ClientResponse:
        """Decode's answer, from its headers on; the caller closes it. Raises LegError."""
        return await self._task

    def drop(self) -> None:
        """Close the connection, so that decode forgets the request."""
        self._task.cancel()
        self._task.add_done_callback(_close)


def _close(task: asyncio.Task[aiohttp.ClientResponse]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
