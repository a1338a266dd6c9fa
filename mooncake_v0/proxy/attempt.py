"""One attempt to serve one request on one pair: the prefill leg, then the decode leg. Called by the relay.

Where the pair allows it the decode leg is sent together with the prefill leg; its answer is looked at after prefill's.

Raises LegFailed as long as the client has got no byte and another pair may be tried; Cut when the request was ended
from outside; ApiError when a stream broke after its first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Iterator

import aiohttp

from mooncake_v0.proxy import failures
from mooncake_v0.proxy.api_errors import ApiError
from mooncake_v0.proxy.balancer import Place
from mooncake_v0.proxy.early import EarlyLeg
from mooncake_v0.proxy.failures import LegFailed
from mooncake_v0.proxy.guard import CLIENT_GONE, CLIENT_STALLED, INSTANCE_LOST, SHUTDOWN, Cut
from mooncake_v0.proxy.job import Job, Services
from mooncake_v0.proxy.legs import EXCHANGE_ERRORS, Answer, LegError, leg_error
from mooncake_v0.proxy.pairs import Instance
from mooncake_v0.proxy.passing import Passing

REFUSED_FIELDS = (400, 422)


class Attempt:
    """The two legs on one pair."""

    def __init__(self, services: Services, job: Job, place: Place) -> None:
        self.services = services
        self.timeouts = services.settings.timeouts
        self.job = job
        self.place = place
        self.pair = place.pair
        self.passing = Passing(services, job, place)
        self._early: EarlyLeg | None = None

    async def run(self) -> None:
        """Serve the request. Returns when the client has the whole answer."""
        try:
            await self._run()
        finally:
            self._drop_early()

    async def _run(self) -> None:
        record = self.job.record
        refusal = None
        if self.job.plan.prefill_body is None:
            record.disaggregated = "skipped"
            record.skip_reason = self.job.plan.reason
        else:
            refusal = await self._prefill_or_fall_back(self.job.plan.prefill_body)
        if refusal is not None:
            await self.passing.whole(refusal, self.pair.prefill)
            return
        if record.disaggregated != "yes":
            self._drop_early()  # decode is to compute this one itself, at once
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
                headers = [*self._json_headers(), *self._send_early(allowed_s)]
                answer = await self.services.upstream.prefill(pair.prefill, self.job.path, body, headers)
            now_s = time.monotonic()
        self.job.record.prefill_s = now_s - started_s
        kind = failures.failing_status(answer.status)
        if kind:
            raise LegFailed(pair.prefill, kind, answer)
        if answer.status < 400 and (answer.status != 200 or not failures.is_json(answer)):
            raise LegFailed(pair.prefill, failures.UNUSABLE, answer)
        pair.prefill.succeeded(now_s, now_s - started_s)
        return answer if answer.status >= 400 else None

    def _send_early(self, prefill_s: float) -> list[tuple[str, str]]:
        """Send decode's leg now, if this pair takes it now; what prefill's leg must say then."""
        pair, services = self.pair, self.services
        wanted = services.settings.early_decode and self.job.plan.one_prompt and pair.hands_off_early
        if not wanted or not pair.decode.usable(time.monotonic()):
            return []
        self._early = EarlyLeg(services.upstream, self.job, pair.decode, prefill_s)
        self.job.record.early = True
        return self._early.headers

    def _drop_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.drop()

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
            response = await self._decode_response()
            try:
                if response.status == 200 and response.content_type == "text/event-stream":
                    await self.passing.events(response, started_s)
                else:
                    await self.passing.other(response, started_s)
            finally:
                # a response that has been read to its end has given its connection back already
                response.close()

    async def _decode_response(self) -> aiohttp.ClientResponse:
        if self._early is not None:
            with contextlib.suppress(LegError):  # as if it had not been sent
                response = await self._early.response()
                self._early = None
                return response
        return await self.services.upstream.decode(self.pair.decode, self.job.target, self.job.body, self.job.headers)

    # both

    @contextlib.contextmanager
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
