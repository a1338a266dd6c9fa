"""Passing decode's answer on to the client: the second half of an attempt.

Raises what its caller, the attempt, tells apart: LegFailed and the client library's errors as long as the client has
got no byte (the request can still move), ApiError once it has.
"""

from __future__ import annotations

import time

import aiohttp

from mooncake_v0.proxy import failures
from mooncake_v0.proxy.api_errors import ApiError
from mooncake_v0.proxy.balancer import Place
from mooncake_v0.proxy.failures import LegFailed
from mooncake_v0.proxy.guard import CLIENT_STALLED
from mooncake_v0.proxy.headers import RawHeaders, returned
from mooncake_v0.proxy.job import Job, Services
from mooncake_v0.proxy.legs import EXCHANGE_ERRORS, Answer, leg_error
from mooncake_v0.proxy.pairs import Instance
from mooncake_v0.proxy.record import USAGE_WITHIN_BYTES
from mooncake_v0.proxy.sse import EventFramer

WHOLE_ANSWER_BYTES = 1024 * 1024  # answers up to this size are complete before the client gets their first byte


class Passing:
    """The way of one answer to the client."""

    def __init__(self, services: Services, job: Job, place: Place) -> None:
        self.services = services
        self.timeouts = services.settings.timeouts
        self.job = job
        self.place = place
        self.decode = place.pair.decode

    def _first_byte(self, started_s: float) -> None:
        """Decode has begun to answer: the request can no longer move, its KV has been taken."""
        now_s = time.monotonic()
        self.job.record.first_byte_s = now_s - self.job.record.start_s
        self.job.record.gap_s = now_s - started_s
        self.decode.committed(self.job.guard)
        self.decode.succeeded(now_s, now_s - started_s)
        self.services.balancer.kv_taken(self.place)

    def _response_headers(self, response: aiohttp.ClientResponse) -> RawHeaders:
        return self._headers(list(response.raw_headers))

    def _headers(self, raw: RawHeaders) -> RawHeaders:
        word = self.job.record.disaggregated.encode()
        kept = returned(raw, self.job.client.request_id)
        return [*kept, (b"x-mooncake-disaggregated", word)] if word else kept

    async def events(self, response: aiohttp.ClientResponse, started_s: float) -> None:
        """Relay a stream of events. The response starts with its first event, so that until then it can move."""
        client, guard, decode, record = self.job.client, self.job.guard, self.decode, self.job.record
        framer = EventFramer()
        last = b""
        while True:
            try:
                data = await response.content.readany()
            except EXCHANGE_ERRORS as error:
                if not client.started:
                    raise
                self._failed(LegFailed(decode, leg_error(decode, error).kind))
                raise ApiError(502, "the decode instance broke off", kind="bad_gateway", code="decode_broke") from error
            whole = framer.feed(data) if data else framer.rest()
            if whole:
                if not client.started:
                    self._first_byte(started_s)
                    await client.start(200, self._response_headers(response), events=True)
                decode.progress(time.monotonic())
                record.events += 1
                guard.expect(CLIENT_STALLED, self.timeouts.client_stall_s)
                await client.write(whole)
                last = (last + whole)[-USAGE_WITHIN_BYTES:]
            if not data:
                break
            guard.expect("decode", self.timeouts.decode_idle_s)
        if not client.started:
            raise LegFailed(decode, failures.UNUSABLE)
        record.find_usage(last)
        if not framer.ended:
            self._failed(LegFailed(decode, failures.UNUSABLE))
            raise ApiError(502, "the decode instance ended early", kind="bad_gateway", code="decode_ended_early")
        guard.rest()
        await client.finish()

    async def other(self, response: aiohttp.ClientResponse, started_s: float) -> None:
        """Relay an answer that is no event stream: read it whole if it is not large, so that it can still move."""
        decode, client = self.decode, self.job.client
        body = b""
        while len(body) < WHOLE_ANSWER_BYTES:
            data = await response.content.readany()
            if not data:
                break
            body += data
        if len(body) < WHOLE_ANSWER_BYTES:
            answer = Answer(response.status, list(response.raw_headers), response.content_type, body)
            kind = failures.failing_status(response.status)
            if kind:
                raise LegFailed(decode, kind, answer)
            self._first_byte(started_s)
            await self.whole(answer, decode)
            return
        self._first_byte(started_s)
        headers = self._response_headers(response)
        if response.content_length is not None:
            headers.append((b"content-length", b"%d" % response.content_length))
        await client.start(response.status, headers)
        while body:
            self.job.guard.expect(CLIENT_STALLED, self.timeouts.client_stall_s)
            await client.write(body)
            self.job.guard.expect("decode", self.timeouts.decode_idle_s)
            body = await response.content.readany()
        self.job.guard.rest()
        await client.finish()

    async def whole(self, answer: Answer, instance: Instance) -> None:
        """Send an answer to the client as it is; an error without a JSON body gets one."""
        upstream_key = self.services.settings.upstream_key
        if answer.status in (401, 403) and upstream_key:
            message = f"the {instance.role} instance refused the proxy's own key"
            raise ApiError(502, message, kind="bad_gateway", code="upstream_key_refused")
        if answer.status >= 400 and not failures.is_json(answer):
            raise failures.wrapped(answer.status, instance.role, f"{instance.role}_status")
        self.job.guard.expect(CLIENT_STALLED, self.timeouts.client_stall_s)
        self.job.record.find_usage(answer.body[-USAGE_WITHIN_BYTES:])
        await self.job.client.send_whole(answer.status, self._headers(answer.headers), answer.body)
        self.job.guard.rest()

    def _failed(self, failure: LegFailed) -> None:
        self.services.leg_failed(self.place.pair.name, failure)
