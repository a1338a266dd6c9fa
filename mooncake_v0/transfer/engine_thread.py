"""The thread of an agent that touches its engine: it starts it, retries until it starts, and reads one job at a time.

The agent's main loop hands it `ReadJob`s and is woken through a socket when a `ReadResult` or a state change waits. Over tcp
it reads with a `TcpReader` instead of the engine.
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


class Reader(Protocol):
    """cancels: a read ends in time, and one that failed writes nothing any more."""

    @property
    def cancels(self) -> bool: ...
    def read(self, segment_name: str, local_address: int, remote_address: int, nbytes: int) -> None: ...


class Engine(Reader, Protocol):
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
    """start() it once; stop() waits for the engine to remove its keys, as far as the deadline allows.

    reader: what reads; the engine itself without one
    reading_since: monotonic seconds, of a read that may hang; None while there is none
    """

    def __init__(self, open_engine: Callable[[], Engine], reader: Reader | None = None) -> None:
        super().__init__(name="engine", daemon=True)
        self._open_engine = open_engine
        self._reader = reader
        self.jobs: queue.Queue[ReadJob | None] = queue.Queue()
        self._results: deque[Result] = deque()
        self.wake_up = WakeUp()
        self.reading_since: float | None = None

    def submit(self, job: ReadJob) -> None:
        self.jobs.put(job)

    def cancel(self, token: Any) -> list[ReadJob]:
        """Take back the jobs with this token that have not begun."""
        taken = []
        for job in self._take_queued():
            if job.token is token:
                taken.append(job)
            else:
                self.jobs.put(job)
        return taken

    def _take_queued(self) -> list[ReadJob]:
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
        self._take_queued()
        self.jobs.put(None)
        self.join(timeout_s)

    def run(self) -> None:
        engine = self._start_engine()
        while engine is not None:
            job = self.jobs.get()
            if job is None:
                engine.close()
                return
            reader = self._reader or engine
            self.reading_since = None if reader.cancels else time.monotonic()
            result = read(reader, job)
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


def read(reader: Reader, job: ReadJob) -> ReadResult:
    started_s = time.monotonic()
    error = None
    try:
        reader.read(job.segment_name, job.local_address, job.remote_address, job.nbytes)
    except MooncakeV0Error as failure:
        error = str(failure)
    seconds = time.monotonic() - started_s
    # An engine gives up after its time-out but does not cancel: the bytes may come when the peer goes on.
    timed_out = error is not None and seconds >= TRANSFER_TIMEOUT_S * 0.8
    return ReadResult(job, seconds, error, may_write_later=timed_out and not reader.cancels)


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
