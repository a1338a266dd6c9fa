"""The way of one inference request through the proxy; the hot path, plain ASGI.

    read the body ─► plan ─► a place on a pair ─► prefill leg ─► decode leg, its bytes passed on as they come

Where a pair can take it, the decode leg is sent with the prefill leg already, and only looked at after it (`early.py`).
Until the first byte of decode's body has been passed on, a request whose pair fails moves, both legs, to another pair.
After it, nothing is repeated: a stream that breaks ends in an error event. A client that goes away cancels whatever
leg is running; the connector's lookup buffer needs no cleaning up. If prefill cannot serve, decode does so alone,
unless told not to; the response header `x-mooncake-disaggregated` says yes, fallback or skipped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Callable

from mooncake_v0.proxy import failures
from mooncake_v0.proxy.api_errors import ApiError, overloaded, unavailable
from mooncake_v0.proxy.attempt import Attempt
from mooncake_v0.proxy.balancer import Want
from mooncake_v0.proxy.client_side import ClientSide, Receive, Scope, Send
from mooncake_v0.proxy.failures import LegFailed
from mooncake_v0.proxy.guard import CLIENT_GONE, CLIENT_STALLED, SHUTDOWN, Cut, Guard, Watchdog
from mooncake_v0.proxy.headers import RawHeaders, forwarded, header, request_id_of, returned
from mooncake_v0.proxy.job import Job, Services
from mooncake_v0.proxy.keys import Keys
from mooncake_v0.proxy.prefill_request import plan_request
from mooncake_v0.proxy.record import Record

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
QUEUE = "queue"


class RetryBudget:
    """Lets one request in five be sent again, and a few in any case, so that retries cannot double an overload."""

    SHARE = 0.2
    LEAST = 3.0
    MOST = 100.0

    def __init__(self) -> None:
        self._left = self.LEAST

    def earn(self) -> None:
        self._left = min(self.MOST, self._left + self.SHARE)

    def spend(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Relay:
    """Serves POST /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        services: Services,
        watchdog: Watchdog,
        finished: Callable[[Record], None],
        response_headers: Callable[[RawHeaders], RawHeaders],
        keys: Keys,
    ) -> None:
        self.services = services
        self.settings = services.settings
        self.balancer = services.balancer
        self.watchdog = watchdog
        self.finished = finished
        self.response_headers = response_headers
        self.keys = keys
        self.budget = RetryBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, whatever happens: the client gets one answer, the record is closed once."""
        request_id = request_id_of(scope["headers"])
        record = Record(request_id, scope["path"])
        client = ClientSide(scope, receive, send, request_id, self.response_headers(scope["headers"]))
        guard = self.watchdog.watch()
        try:
            await self._answer(scope, client, guard, record)
        except ApiError as error:
            record.error = error.code
            record.outcome = "broken" if client.started else ""
            await client.fail(error)
        except Cut as cut:
            # nobody is there to be told; the server closes the connection of a response that has no end
            record.outcome = CLIENT_GONE
            record.error = cut.cause
        finally:
            client.unwatch()
            self.watchdog.forget(guard)
            self._close(record, client)

    def _close(self, record: Record, client: ClientSide) -> None:
        record.status = client.status or (499 if record.outcome == CLIENT_GONE else 500)
        record.bytes_sent = client.bytes_sent
        record.total_s = time.monotonic() - record.start_s
        if not record.outcome:
            record.outcome = "ok" if record.status < 400 else "client_error" if record.status < 500 else "error"
        self.finished(record)

    async def _answer(self, scope: Scope, client: ClientSide, guard: Guard, record: Record) -> None:
        """Read, plan, and attempt until it is served; the one border that knows why the task was cancelled."""
        try:
            self.keys.check(header(client.headers, b"authorization"))
            guard.expect(CLIENT_STALLED, self.settings.timeouts.client_stall_s)
            body = await client.read_body(self.settings.limits.body_bytes)
            guard.rest()
            if self.balancer.full:
                raise overloaded("too many requests are waiting", retry_after_s=self.balancer.retry_after_s())
            client.watch(guard)
            await self._serve(self._job(scope, client, guard, record, body))
        except asyncio.CancelledError:
            cut = guard.explain()
            if cut is None:
                raise
            if cut.cause == SHUTDOWN:
                raise unavailable("the proxy is shutting down", code="shutting_down") from None
            if cut.cause == QUEUE:
                raise unavailable("no place became free in time", code="queue_timeout") from None
            raise cut from None

    def _job(self, scope: Scope, client: ClientSide, guard: Guard, record: Record, body: bytes) -> Job:
        path, query = scope["path"], scope["query_string"]
        plan = plan_request(
            path,
            header(client.headers, b"content-type").decode("latin-1"),
            body,
            max_model_len=self.balancer.max_model_len,
            min_prefill_tokens=self.settings.min_prefill_tokens,
        )
        record.stream, record.prompt_tokens, record.body_bytes = plan.stream, plan.prompt_tokens, len(body)
        target = f"{path}?{query.decode('latin-1')}" if query else path
        headers = forwarded(
            client.headers, client.request_id, self.settings.upstream_key, keep_authorization=not self.keys
        )
        return Job(client, guard, record, plan, path, target, body, headers)

    async def _serve(self, job: Job) -> None:
        """Attempt on one pair after the other. Raises the last failure as the client shall see it."""
        self.budget.earn()
        tried: tuple[str, ...] = ()
        while True:
            want = self._want(job, tried)
            waiting_since_s = time.monotonic()
            job.record.phase = QUEUE
            job.guard.expect(QUEUE, self.settings.limits.queue_s)
            place = await self.balancer.acquire(want)
            job.guard.rest()
            job.record.queued_s += time.monotonic() - waiting_since_s
            job.record.pair = place.pair.name
            job.record.attempts += 1
            try:
                await Attempt(self.services, job, place).run()
                return
            except LegFailed as failure:
                self.services.leg_failed(place.pair.name, failure)
                tried = (*tried, place.pair.name)
                if not self._may_move(job, failure, tried):
                    await self._give_up(job, failure)
                    return
                if not self._others(job, tried):
                    tried = ()  # the same pair once more: a connection may just have been closed as it was reused
            finally:
                self.balancer.release(place)

    def _want(self, job: Job, tried: tuple[str, ...]) -> Want:
        wants_prefill = job.plan.prefill_body is not None
        return Want(
            prompt_key=job.plan.prompt_key,
            prompt_tokens=job.plan.prompt_tokens,
            prefill=wants_prefill,
            require_prefill=wants_prefill and self.settings.require_prefill,
            avoid=tried,
        )

    def _others(self, job: Job, tried: tuple[str, ...]) -> bool:
        return bool(self.balancer.candidates(self._want(job, tried), time.monotonic()))

    def _may_move(self, job: Job, failure: LegFailed, tried: tuple[str, ...]) -> bool:
        """Whether to try again, on another pair, or after a connection that broke or did not come once on the same."""
        if job.record.attempts > self.settings.retries and failure.kind not in failures.EVIDENTLY_DEAD:
            return False
        if job.record.attempts >= MAX_ATTEMPTS or self.settings.retries == 0:
            return False
        if self._others(job, tried):
            return failure.kind in failures.EVIDENTLY_DEAD or self.budget.spend()
        return failure.kind in (failures.RESET, failures.CONNECT) and job.record.attempts == 1

    async def _give_up(self, job: Job, failure: LegFailed) -> None:
        """The last failure is the answer: the instance's own words if they are JSON, else ours."""
        job.record.error = f"{failure.instance.role}_{failure.kind}"
        answer = failure.answer
        if answer is None or answer.status < 400 or not failures.is_json(answer):
            raise failures.told_to_client(failure)
        headers = returned(answer.headers, job.client.request_id)
        await job.client.send_whole(answer.status, headers, answer.body)
