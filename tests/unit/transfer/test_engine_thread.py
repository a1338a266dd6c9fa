"""The thread that reads, with readers whose reads end when the test says so."""

from __future__ import annotations

import queue
import threading
from typing import Iterator

import pytest

from mooncake_v0.errors import EngineError
from mooncake_v0.transfer import engine_thread
from mooncake_v0.transfer.engine_thread import READY, EngineThread, ReadJob, ReadResult
from tests.servers import wait_until


class Waiting:
    """Reads until it gets an outcome; None is success."""

    def __init__(self, *, cancels: bool) -> None:
        self.cancels = cancels
        self.outcomes: queue.Queue[str | None] = queue.Queue()
        self.read_jobs: list[int] = []
        self.closed = threading.Event()

    def read(self, segment_name: str, local_address: int, remote_address: int, nbytes: int) -> None:
        self.read_jobs.append(nbytes)
        outcome = self.outcomes.get(timeout=20)
        if outcome is not None:
            raise EngineError(outcome)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def engine() -> Waiting:
    return Waiting(cancels=False)


@pytest.fixture(params=[None, Waiting(cancels=True)], ids=["engine", "tcp"])
def thread(request: pytest.FixtureRequest, engine: Waiting) -> Iterator[tuple[EngineThread, Waiting]]:
    """A started thread, and what reads in it."""
    made = EngineThread(lambda: engine, request.param)
    made.start()
    assert wait_for(made) == READY
    yield made, request.param or engine
    made.stop(10)
    assert engine.closed.is_set() and not made.is_alive()


def wait_for(thread: EngineThread) -> object:
    found: list[object] = []
    wait_until(lambda: found.extend(thread.take_results()) or found, "a result")
    assert len(found) == 1
    return found[0]


def job(nbytes: int) -> ReadJob:
    return ReadJob("a token", "peer", 0, 0, nbytes)


def test_jobs_are_read_in_order_and_failures_told(thread: tuple[EngineThread, Waiting]) -> None:
    made, reader = thread
    reader.read_jobs.clear()
    for nbytes, outcome in ((1, None), (2, "failed"), (3, None)):
        reader.outcomes.put(outcome)
        made.submit(job(nbytes))

    found: list[object] = []
    wait_until(lambda: found.extend(made.take_results()) or len(found) == 3, "all results")

    results = [result for result in found if isinstance(result, ReadResult)]
    assert [(result.job.nbytes, result.error) for result in results] == [(1, None), (2, "failed"), (3, None)]
    assert reader.read_jobs == [1, 2, 3]


def test_only_the_jobs_of_one_token_are_taken_back_and_not_the_one_that_is_read(
    thread: tuple[EngineThread, Waiting],
) -> None:
    made, reader = thread
    reader.read_jobs.clear()
    for token, nbytes in (("a", 1), ("a", 2), ("b", 3), ("a", 4), ("b", 5)):
        made.submit(ReadJob(token, "peer", 0, 0, nbytes))
    wait_until(lambda: reader.read_jobs, "it reads")

    assert [job.nbytes for job in made.cancel("a")] == [2, 4]

    for _ in range(3):
        reader.outcomes.put(None)
    found: list[object] = []
    wait_until(lambda: found.extend(made.take_results()) or len(found) == 3, "all results")
    assert reader.read_jobs == [1, 3, 5]


def test_a_read_that_may_hang_has_a_beginning(thread: tuple[EngineThread, Waiting]) -> None:
    made, reader = thread
    reader.read_jobs.clear()
    made.submit(job(1))
    wait_until(lambda: reader.read_jobs, "it reads")

    assert (made.reading_since is None) is reader.cancels
    reader.outcomes.put(None)
    wait_for(made)
    assert made.reading_since is None


@pytest.mark.parametrize("outcome, is_late", [("failed", True), ("failed", False), (None, True)])
def test_only_an_engines_time_out_may_write_later(
    thread: tuple[EngineThread, Waiting], monkeypatch: pytest.MonkeyPatch, outcome: str | None, is_late: bool
) -> None:
    made, reader = thread
    monkeypatch.setattr(engine_thread, "TRANSFER_TIMEOUT_S", 0.0 if is_late else 1000.0)
    reader.outcomes.put(outcome)
    made.submit(job(1))

    result = wait_for(made)

    assert isinstance(result, ReadResult)
    assert result.may_write_later is (outcome is not None and is_late and not reader.cancels)
