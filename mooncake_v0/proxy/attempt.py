"""One attempt to serve one request on one pair: the prefill leg, then the decode leg. Called by the relay.

Raises LegFailed as long as the client has got no byte and another pair may be tried; Cut when the request was ended
from outside; ApiError when a stream broke after its first byte.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator

import aiohttp

from mooncake_v0.proxy import failures
from mooncake_v0.proxy.api_errors import ApiError
from mooncake_v0.proxy.balancer import Balancer, Place
from mooncake_v0.proxy.client_side import ClientSide
from mooncake_v0.proxy.failures import LegFailed
from mooncake_v0.proxy.guard import CLIENT_GONE, CLIENT_STALLED, INSTANCE_LOST, SHUTDOWN, Cut, Guard
from mooncake_v0.proxy.headers import RawHeaders, returned
from mooncake_v0.proxy.legs import EXCHANGE_ERRORS, Answer, LegError, Upstream, leg_error
from mooncake_v0.proxy.pairs import Instance
from mooncake_v0.proxy.prefill_request import RequestPlan
from mooncake_v0.proxy.record import USAGE_WITHIN_BYTES, Record
from mooncake_v0.proxy.settings import ProxySettings
from mooncake_v0.proxy.sse import EventFramer

REFUSED_FIELDS = (400, 422)
WHOLE_ANSWER_BYTES = 1024 * 1024  # answers up to this size are complete before the client gets their first byte


@dataclass(frozen=True)
class Services:
    """What every request needs; lives as long as the app."""

    settings: ProxySettings
    balancer: Balancer
    upstream: Upstream
    leg_failed: Callable[[str, LegFailed], None]  # pair's name, failure: counts it against whom it is due


@dataclass(frozen=True)
class Job:
    """One request, read and planned. target: path and query as the client wrote them."""

    client: ClientSide
    guard: Guard
    record: Record
    plan: RequestPlan
    path: str
    target: str
    body: bytes
    headers: list[tuple[str, str]]


class Attempt:
    """The two legs on one pair."""

    def __init__(self, services: Services, job: Job, place: Place) -> None:
        self.services = services
        self.timeouts = services.settings.timeouts
        self.job = job
        self.place = place
        self.pair = place.pair

    async def run(self) -> None:
        """Serve the request. Returns when the client has the whole answer."""
        record = self.job.record
        refusal = None
        if self.job.plan.prefill_body is None:
            record.disaggregated = "skipped"
            record.skip_reason = self.job.plan.reason
        else:
            refusal = await self._prefill_or_fall_back(self.job.plan.prefill_body)
        if refusal is not None:
            await self._pass_whole(refusal, self.pair.prefill)
        else:
            await self._decode()

    # prefill

    async def _prefill_or_fall_back(self, body: bytes) -> Answer | None:
        """Run the prefill leg. An answer is a refusal to pass on; without one, decode is next.

        Raises LegFailed when prefill failed and decode alone is not wanted: either another pair has both instances
        to offer, or the operator requires prefill.
        """
        record = self.job.record
        if not self.pair.prefill.usable(time.monotonic()) and not self.services.settings.require_prefill:
            record.disaggregated = "fallback"
            return None
        if await self._too_long_for_decode():
            record.disaggregated, record.skip_reason = "skipped", "invalid"
            return None
        try:
            refusal = await self._prefill(body)
        except LegFailed as failure:
            if self.services.settings.require_prefill or self._another_pair_is_whole():
                raise
            self._failed(failure)
            record.disaggregated = "fallback"
            record.error = failure.kind
            return None
        if refusal is not None and refusal.status in REFUSED_FIELDS and not self.services.settings.require_prefill:
            # vLLM's message quotes the body, and this one quotes the copy; decode refuses the client's own words, or
            # serves what only this prefill instance will not have
            record.disaggregated, record.skip_reason = "skipped", "refused_by_prefill"
            return None
        record.disaggregated = "yes" if refusal is None else ""
        return refusal

    def _another_pair_is_whole(self) -> bool:
        now_s = time.monotonic()
        others = (pair for pair in self.services.balancer.pairs.values() if pair is not self.pair)
        return any(p.prefill.usable(now_s) and p.decode.usable(now_s) and not p.draining for p in others)

    async def _too_long_for_decode(self) -> bool:
        """Ask decode to count a text's tokens where it may not fit the context; an unclear answer counts as fitting."""
        question = self.job.plan.tokenize_body
        if question is None:
            return False
        try:
            with self._leg(self.pair.decode, "tokenize", self.timeouts.connect_s * 5):
                answer = await self.services.upstream.exchange(
                    self.pair.decode, "POST", "/tokenize", question, self._json_headers()
                )
            count = int(json.loads(answer.body)["count"])
        except (LegFailed, ValueError, KeyError, TypeError):
            return False
        limit = self.pair.decode.max_model_len
        return 0 < limit < count + self.job.plan.answer_tokens

    async def _prefill(self, body: bytes) -> Answer | None:
        plan, timeouts, pair = self.job.plan, self.timeouts, self.pair
        allowed_s = timeouts.prefill_s + timeouts.prefill_s_per_1k_tokens * plan.prompt_tokens / 1000
        self.job.guard.expect("queue", self.services.settings.limits.queue_s)
        async with pair.prefill_places:
            started_s = time.monotonic()
            self.job.record.phase = "prefill"
            with self._leg(pair.prefill, "prefill", allowed_s):
                answer = await self.services.upstream.prefill(pair.prefill, self.job.path, body, self._json_headers())
            now_s = time.monotonic()
        self.job.record.prefill_s = now_s - started_s
        kind = failures.failing_status(answer.status)
        if kind:
            raise LegFailed(pair.prefill, kind, answer)
        if answer.status < 400 and (answer.status != 200 or not failures.is_json(answer)):
            raise LegFailed(pair.prefill, failures.UNUSABLE, answer)
        pair.prefill.succeeded(now_s, now_s - started_s)
        return answer if answer.status >= 400 else None

    def _json_headers(self) -> list[tuple[str, str]]:
        return [(name, value) for name, value in self.job.headers if name != "content-type"] + [
            ("content-type", "application/json")
        ]

    # decode

    async def _decode(self) -> None:
        plan, timeouts, decode = self.job.plan, self.timeouts, self.pair.decode
        started_s = time.monotonic()
        self.job.record.phase = "decode"
        first_s = timeouts.decode_first_byte_s if plan.stream else timeouts.decode_json_s
        with self._leg(decode, "decode", first_s):
            response = await self.services.upstream.decode(decode, self.job.target, self.job.body, self.job.headers)
            try:
                if response.status == 200 and response.content_type == "text/event-stream":
                    await self._pass_events(response, started_s)
                else:
                    await self._pass_other(response, started_s)
            finally:
                # a response that has been read to its end has given its connection back already
                response.close()

    def _first_byte(self, started_s: float) -> None:
        """Decode has begun to answer: the request can no longer move, its KV has been taken."""
        now_s = time.monotonic()
        self.job.record.first_byte_s = now_s - self.job.record.start_s
        self.job.record.gap_s = now_s - started_s
        self.pair.decode.committed(self.job.guard)
        self.pair.decode.succeeded(now_s, now_s - started_s)
        self.services.balancer.kv_taken(self.place)

    def _response_headers(self, response: aiohttp.ClientResponse) -> RawHeaders:
        return self._headers(list(response.raw_headers))

    def _headers(self, raw: RawHeaders) -> RawHeaders:
        word = self.job.record.disaggregated.encode()
        kept = returned(raw, self.job.client.request_id)
        return [*kept, (b"x-mooncake-disaggregated", word)] if word else kept

    async def _pass_events(self, response: aiohttp.ClientResponse, started_s: float) -> None:
        """Relay a stream of events. The response starts with its first event, so that until then it can move."""
        client, guard, decode, record = self.job.client, self.job.guard, self.pair.decode, self.job.record
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

    async def _pass_other(self, response: aiohttp.ClientResponse, started_s: float) -> None:
        """Relay an answer that is no event stream: read it whole if it is not large, so that it can still move."""
        decode, client = self.pair.decode, self.job.client
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
            await self._pass_whole(answer, decode)
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

    async def _pass_whole(self, answer: Answer, instance: Instance) -> None:
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

    # both

    @contextmanager
    def _leg(self, instance: Instance, step: str, seconds: float) -> Iterator[None]:
        """Count a leg in and out, with its deadline; turn what ends it into LegFailed where it may still move."""
        guard = self.job.guard
        instance.begin(guard)
        guard.expect(step, seconds)
        try:
            yield
        except LegError as error:
            raise LegFailed(instance, error.kind) from error
        except EXCHANGE_ERRORS as error:
            if self.job.client.started:
                raise
            raise LegFailed(instance, leg_error(instance, error).kind) from error
        except asyncio.CancelledError:
            cut = guard.explain()
            if cut is None:
                raise
            raise self._after_cut(cut, instance) from None
        finally:
            guard.rest()
            instance.end(guard)

    def _after_cut(self, cut: Cut, instance: Instance) -> Exception:
        if cut.cause in (CLIENT_GONE, CLIENT_STALLED):
            return cut
        if cut.cause == SHUTDOWN:
            return ApiError(503, "the proxy is shutting down", kind="service_unavailable", code="shutting_down")
        kind = failures.LOST if cut.cause == INSTANCE_LOST else failures.TIMEOUT
        failure = LegFailed(instance, kind)
        if not self.job.client.started:
            return failure
        self._failed(failure)
        return failures.told_to_client(failure)

    def _failed(self, failure: LegFailed) -> None:
        self.services.leg_failed(self.pair.name, failure)
