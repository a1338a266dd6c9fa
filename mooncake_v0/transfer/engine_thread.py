"""The threads of an agent that touch an engine: one starts it, retries until it starts, and reads one job at a time.

The agent's main loop hands it `ReadJob`s and is woken through a socket when a `ReadResult` or a state change waits. On few
cores one read at a time is the fastest: each waiting transfer burns a core (engine 0.3.3.post2). On a host with cores to
spare a `SecondReader` with an engine of its own takes jobs from the same queue: one engine's single tcp thread copies no
more than 3 to 4 GB/s, while the one that serves it at the other end is busy for 60 % of the time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Callable, Protocol, Union

from mooncake_v0.errors import EngineError, MetadataError, MooncakeV0Error, UnsupportedError
from mooncake_v0.transfer.engine import TRANSFER_TIMEOUT_S, EngineSettings, MooncakeEngine
from mooncake_v0.transfer.wake_up import WakeUp

logger = logging.getLogger(__name__)

STARTING, READY = "starting", "ready"
_RETRY_S = (0.5, 1.0, 2.0, 5.0)


class Engine(Protocol):
    def read(self, segment_name: str, local_address: int, remote_address: int, nbytes: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ReadJob:
    """Copy nbytes of a peer's segment to local_address. token comes back with the result."""

    token: Any
    segment_name: str
    local_address: int
    remote_address: int
    nbytes: int


@dataclass(frozen=True)
class ReadResult:
    """error is None when all bytes are here; may_write_later: the region must stay untouched by others."""

    job: ReadJob
    seconds: float
    error: str | None
    may_write_later: bool = False


Result = Union[ReadResult, str]  # a str is the engine's new state


class EngineThread(threading.Thread):
    """start() it once; stop() waits for the engine to remove its keys, as far as the deadline allows."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        super().__init__(name="engine", daemon=True)
        self._open_engine = open_engine
        self.jobs: queue.Queue[ReadJob | None] = queue.Queue()
        self._results: deque[Result] = deque()
        self.wake_up = WakeUp()
        self.reading_since: float | None = None  # monotonic seconds; None while idle

    def submit(self, job: ReadJob) -> None:
        self.jobs.put(job)

    def cancel_queued(self) -> list[ReadJob]:
        """Take back the jobs that have not begun."""
        taken: list[ReadJob] = []
        while True:
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                return taken
            if job is not None:
                taken.append(job)

    def take_results(self) -> list[Result]:
        self.wake_up.clear()
        found = []
        while self._results:
            found.append(self._results.popleft())
        return found

    def stop(self, timeout_s: float) -> None:
        self.cancel_queued()
        self.jobs.put(None)
        self.join(timeout_s)

    def run(self) -> None:
        engine = self._start_engine()
        while engine is not None:
            job = self.jobs.get()
            if job is None:
                self.jobs.put(None)  # for a second reader
                engine.close()
                return
            self.reading_since = time.monotonic()
            result = read(engine, job)
            self.reading_since = None
            self.post(result)

    def _start_engine(self) -> Engine | None:
        """Try until the engine starts; None when asked to stop meanwhile. Jobs that arrive before fail."""
        tries = 0
        while True:
            try:
                engine = self._open_engine()
                self.post(READY)
                return engine
            except (EngineError, MetadataError, UnsupportedError) as error:
                self.post(f"failed: {error}")
            deadline = time.monotonic() + _RETRY_S[min(tries, len(_RETRY_S) - 1)]
            tries += 1
            while time.monotonic() < deadline:
                try:
                    job = self.jobs.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    break
                if job is None:
                    return None
                self.post(ReadResult(job, 0.0, "the engine has not started"))

    def post(self, result: Result) -> None:
        self._results.append(result)
        self.wake_up.set()


class SecondReader(threading.Thread):
    """Reads beside an EngineThread, with an engine of its own. Without one, because it does not start, that reads alone."""

    def __init__(self, first: EngineThread, open_engine: Callable[[], Engine]) -> None:
        super().__init__(name="second reader", daemon=True)
        self._first = first
        self._open_engine = open_engine
        self.reading_since: float | None = None
        self._engine: Engine | None = None

    def run(self) -> None:
        """Until the agent ends. The engine ends with the process: its destructor would complain that it has no keys."""
        try:
            engine = self._engine = self._open_engine()
        except MooncakeV0Error as error:
            logger.warning("one reader instead of two: %s", error)
            return
        logger.info("a second reader is ready")
        while (job := self._first.jobs.get()) is not None:
            self.reading_since = time.monotonic()
            result = read(engine, job)
            self.reading_since = None
            self._first.post(result)
        self._first.jobs.put(None)


def read(engine: Engine, job: ReadJob) -> ReadResult:
    started_s = time.monotonic()
    error = None
    try:
        engine.read(job.segment_name, job.local_address, job.remote_address, job.nbytes)
    except MooncakeV0Error as failure:
        error = str(failure)
    seconds = time.monotonic() - started_s
    # The engine gives up after its time-out but does not cancel: the bytes may come when the peer goes on.
    return ReadResult(job, seconds, error, error is not None and seconds >= TRANSFER_TIMEOUT_S * 0.8)


def engine_opener(
    settings: EngineSettings,
    region_address: int,
    region_nbytes: int,
    *,
    before: Callable[[], None],
    open_gateway: Callable[[], str] | None,
    after: Callable[[], None],
) -> Callable[[], Engine]:
    """A function that starts the engine, through a private gateway where the engine cannot take the URL itself.

    before: address free? after: did it publish what was configured? Whatever they raise, the engine has not started.
    """
    gateway_url: list[str] = []

    def open_engine() -> Engine:
        before()
        if open_gateway is not None and not gateway_url:
            gateway_url.append(open_gateway())
        url = gateway_url[0] if gateway_url else settings.metadata_url
        engine = MooncakeEngine(replace(settings, metadata_url=url), region_address, region_nbytes)
        try:
            after()
        except MooncakeV0Error:
            engine.close()
            raise
        return engine

    return open_engine
