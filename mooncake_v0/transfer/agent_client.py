"""The worker's end of its transfer agent: starts it, talks to it with deadlines, replaces it when it dies or hangs.

One per worker. The engine step calls `reserve`, `commit`, `select` and `release`; a supervisor thread owns the process.
A call that finds no agent, or gets no answer in time, raises AgentUnavailableError and the step goes on without transfer.

Life of an agent: spawned (a fresh interpreter; never forked, the engine's destructor in a forked child deletes its
parent's keys) → running → its end is seen through its socket → the next one is spawned, with growing pauses when they die
young. The pool belongs to the worker and outlives them; `step` keeps a new agent from writing into it while the step still
copies, and the peer's mapped pool from going away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Sequence, TypeVar

from mooncake_v0.errors import AgentUnavailableError, ProtocolError, TransferError
from mooncake_v0.transfer.agent_settings import CUDA_IPC, AgentSettings
from mooncake_v0.transfer.engine import check_engine_version, engine_environment
from mooncake_v0.transfer.engine_thread import STARTING
from mooncake_v0.transfer.in_use import InUse
from mooncake_v0.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Abort,
    Commit,
    Ended,
    Message,
    PeerPool,
    PeerPoolMapped,
    Poll,
    Polled,
    Release,
    Report,
    Reserve,
    Reserved,
    Select,
    Selected,
    Status,
    WorkerStatus,
    WorkerStatusRequest,
    encode,
)
from mooncake_v0.transfer.peer import NO_PEER
from mooncake_v0.transfer.pool import DeviceMemory, Pool
from mooncake_v0.transfer.worker_checks import decode_checked

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 1.0
_RESTART_PAUSES_S = (0.1, 1.0, 5.0, 15.0)
_YOUNG_S = 20.0
_STOP_S = 3.0
_WATCH_S = 0.05
_LOOK_S = 5.0  # a supervisor that nothing wakes: every wake-up takes the interpreter from the engine step
_START_S = 60.0


Answer = TypeVar("Answer", Reserved, Selected, Polled, WorkerStatus)


@dataclass(frozen=True)
class PageLocks:
    """How to page-lock a pool where there is a GPU, and to undo it; called from any thread."""

    lock: Callable[[Pool], None] = lambda pool: None
    unlock: Callable[[Pool], None] = lambda pool: None


@dataclass(frozen=True)
class DevicePools:
    """Pools in the memory of the worker's GPU. allocate: nbytes → new memory; open: (handle, nbytes) → another process's."""

    allocate: Callable[[int], DeviceMemory]
    open: Callable[[bytes, int], DeviceMemory]


class AgentClient:
    """start() once; close() at exit. The engine step's thread makes the calls, one at a time.

    on_report: called with the agent's state when it has changed, once a second at most, and with None when it has ended; set
               it before start()
    pool: the worker's own; peer_pool: the peer's, mapped on the same host, and its number (None, 0: not mapped)
    """

    def __init__(
        self,
        settings: AgentSettings,
        page_locks: PageLocks = PageLocks(),
        device_pools: DevicePools | None = None,
    ) -> None:
        check_engine_version()
        self.pool = _create_pool(settings, device_pools)
        self.pool.allocate_pages()
        self.pool.map_pages()
        if not self.pool.on_device:
            page_locks.lock(self.pool)
        self.peer_pool: Pool | None = None
        self.peer_pool_number = 0
        self._page_locks = page_locks
        self._device_pools = device_pools
        self._events: socket.socket | None = None
        handle = self.pool.device.handle.hex() if self.pool.device else ""
        self.settings = replace(settings, pool_nbytes=self.pool.nbytes, device_handle=handle)
        self.restarts = 0
        self.on_report: Callable[[Status | None], None] = lambda status: None
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._calls = 0
        self._io_lock = threading.Lock()
        self.in_use = InUse()
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="agent-supervisor", daemon=True)

    def start(self) -> None:
        self._supervisor.start()

    def wait_started(self, timeout_s: float) -> None:
        """Until the agent runs and its engine has started or failed, so that the first request can be transferred."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self.running:
                with contextlib.suppress(AgentUnavailableError):
                    if self.status().engine != STARTING:
                        return
            self._closing.wait(_WATCH_S)

    @property
    def running(self) -> bool:
        return self._socket is not None

    @property
    def has_no_peer(self) -> bool:
        """Whether the agent runs and has no peer: then every answer is known without asking."""
        return self.running and not self.pool.has_peer

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Held while offsets in a pool are in use: no new agent is started, and no pool unmapped meanwhile."""
        self.in_use.enter()
        try:
            yield
        finally:
            self.in_use.leave()

    def reserve(self, keys: Sequence[bytes], nbytes: Sequence[int]) -> Reserved:
        """Space for entries, per key an offset or -1 with the reason."""
        if self.has_no_peer:
            return Reserved(0, [-1] * len(keys), [NO_PEER] * len(keys))
        answer = self._call(Reserve(self._next_call(), list(keys), list(nbytes)), Reserved, CALL_DEADLINE_S)
        self._check_inside(len(keys), [0] * len(answer.offsets), answer.offsets, nbytes)
        return answer

    def commit(self, keys: Sequence[bytes], ready_nbytes: Sequence[int]) -> None:
        self._tell(Commit(list(keys), list(ready_nbytes)))

    def abort(self, keys: Sequence[bytes]) -> None:
        self._tell(Abort(list(keys)))

    def select(self, keys: Sequence[bytes], wait_s: float) -> Selected:
        """Pin entries; waits up to wait_s for those in flight. Every offset must be given back by `release`."""
        if self.has_no_peer:
            nothing = [0] * len(keys)
            return Selected(0, [-1] * len(keys), nothing, [NO_PEER] * len(keys), nothing, nothing)
        answer = self._call(Select(self._next_call(), list(keys), wait_s), Selected, wait_s + CALL_DEADLINE_S)
        self._check_inside(len(keys), answer.pools, answer.offsets, answer.nbytes)
        return answer

    def poll(self, keys: Sequence[bytes], wait_s: float, handoffs: Sequence[bytes] = ()) -> Polled:
        """Which entries are settled: here, or known not to come. Waits up to wait_s for the first one.

        handoffs: per key what is to bring it, or nothing; none at all: of no key
        """
        if self.has_no_peer:
            return Polled(0, [True] * len(keys), [False] * len(keys), [None] * len(keys))
        poll = Poll(self._next_call(), list(keys), wait_s, list(handoffs) or [b""] * len(keys))
        answer = self._call(poll, Polled, wait_s + CALL_DEADLINE_S)
        offsets = [-1 if one is None else one.offset for one in answer.arriving]
        nbytes = [0 if one is None else one.nbytes for one in answer.arriving]
        self._check_inside(len(keys), [0] * len(offsets), offsets, nbytes)
        return answer

    def end(self, handoffs: Sequence[bytes]) -> None:
        """Prefill: these handoffs will bring nothing more."""
        if not self.has_no_peer:
            self._tell(Ended(list(handoffs)))

    def release(self, keys: Sequence[bytes], counters: dict[str, float]) -> None:
        self._tell(Release(list(keys), counters))

    def status(self) -> Status:
        return self._call(WorkerStatusRequest(self._next_call()), WorkerStatus, CALL_DEADLINE_S).status

    def close(self) -> None:
        """End the agent; it removes its keys. Waits at most a few seconds."""
        self._closing.set()
        self._hang_up()
        if self._supervisor.is_alive():
            self._supervisor.join(_STOP_S + 1.0)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _call(
        self, message: Reserve | Select | Poll | WorkerStatusRequest, kind: type[Answer], deadline_s: float
    ) -> Answer:
        until_s = time.monotonic() + deadline_s
        with self._io_lock:
            sock = self._socket
            if sock is None:
                raise AgentUnavailableError("the transfer agent is not running")
            try:
                sock.settimeout(deadline_s)
                sock.send(encode(message))
                while time.monotonic() < until_s:  # an agent may talk all the time and never answer
                    sock.settimeout(max(0.001, until_s - time.monotonic()))
                    data = sock.recv(MAX_MESSAGE_BYTES)
                    if not data:
                        raise ConnectionError("the agent has closed its socket")
                    answer = decode_checked(data)
                    if isinstance(answer, kind) and answer.call == message.call:
                        return answer
                raise TimeoutError
            except OSError as error:
                self._hang_up()
                raise AgentUnavailableError(f"the transfer agent gave no answer within {deadline_s:.1f} s") from error
            except ProtocolError as error:
                self._hang_up()
                raise AgentUnavailableError(f"the transfer agent sent {error}") from error

    def _check_inside(self, count: int, pools: Sequence[int], offsets: Sequence[int], nbytes: Sequence[int]) -> None:
        """Give up an agent that answers for other keys than were asked, or with bytes outside of a pool."""
        rows = [row for row in zip(pools, offsets, nbytes) if row[1] >= 0]
        if len(offsets) == count and all(offset + size <= self._nbytes_of(number) for number, offset, size in rows):
            return
        self._hang_up()
        raise AgentUnavailableError("the transfer agent answers with entries that cannot be")

    def _nbytes_of(self, number: int) -> int:
        """Size of a pool; a peer's that is not mapped any more is not looked into (its number is compared again)."""
        if number == 0:
            return self.pool.nbytes
        pool = self.peer_pool if number == self.peer_pool_number else None
        return sys.maxsize if pool is None else pool.nbytes

    def _tell(self, message: Message) -> None:
        with self._io_lock:
            sock = self._socket
            if sock is None:
                return
            try:
                sock.settimeout(CALL_DEADLINE_S)
                sock.send(encode(message))
            except OSError:
                self._hang_up()

    def _hang_up(self) -> None:
        """Forget this agent; the supervisor sees its socket shut down and replaces it."""
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # --- supervision --------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """The process's parent thread: it lives as long as the worker, which the agent's death signal depends on."""
        young_deaths = 0
        while not self._closing.is_set():
            started_s = time.monotonic()
            with self.in_use.by_nobody():
                sock = self._spawn()
            self._watch(sock)
            self._drop_peer_pool()
            if self._closing.is_set():
                return
            self.on_report(None)
            self.restarts += 1
            young_deaths = young_deaths + 1 if time.monotonic() - started_s < _YOUNG_S else 0
            pause_s = _RESTART_PAUSES_S[min(young_deaths, len(_RESTART_PAUSES_S) - 1)]
            logger.warning("the transfer agent has ended and is started again in %.1f s", pause_s)
            self._closing.wait(pause_s)

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._events, their_events = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = (self.pool.fd, theirs.fileno(), their_events.fileno())
        environment = engine_environment(os.environ, self.settings.config.metadata_server)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mooncake_v0.transfer.agent", *map(str, inherited)],
            stdin=subprocess.PIPE,
            pass_fds=inherited,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        their_events.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(self.settings.to_json().encode())
        return ours

    def _watch(self, sock: socket.socket) -> None:
        """Until the agent has ended, or a call gave it up. Calls reach it from its first message on."""
        assert self._process is not None
        if self._hears_from(sock):
            self._socket = sock
        while self._process.poll() is None and self._socket is not None and not self._closing.is_set():
            if not self._serve_events(sock):
                break
        self._socket = None
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        if self._closing.is_set():
            self._wait_for_exit()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        sock.close()
        if self._events is not None:
            self._events.close()

    # --- the peer's pool, on the same host ----------------------------------------------------------------------------

    def _serve_events(self, sock: socket.socket) -> bool:
        """Wait for an event of the agent, or until somebody hangs up; False if it sends what it should not, or has ended.

        sock: the calls', which is shut down by either end
        """
        assert self._events is not None
        poller = select.poll()
        poller.register(self._events, select.POLLIN)
        poller.register(sock, 0)  # its messages are for the engine step, its end is for us
        ready = dict(poller.poll(_LOOK_S * 1000))
        if self._events.fileno() not in ready:
            return sock.fileno() not in ready
        try:
            self._events.settimeout(0)
            data, descriptors, _, _ = socket.recv_fds(self._events, MAX_MESSAGE_BYTES, 1)
            event = decode_checked(data) if data else None
        except BlockingIOError:
            return True
        except (OSError, ProtocolError):
            return False
        if isinstance(event, Report) and not descriptors:
            self.on_report(event.status)
            return True
        if not isinstance(event, PeerPool) or bool(event.number) != bool(descriptors):
            return False
        if descriptors:
            self._take_peer_pool(event, descriptors[0])
        else:
            self._drop_peer_pool()
        return True

    def _take_peer_pool(self, event: PeerPool, fd: int) -> None:
        """Map the pool, or go on with the mapping if it is the same memory; then tell the agent."""
        pool = self.peer_pool
        if pool is not None and os.path.sameopenfile(pool.fd, fd):
            os.close(fd)
        else:
            self._drop_peer_pool()
            try:
                pool = self._map_peer_pool(event, fd)
            except (OSError, ValueError, TransferError) as error:
                logger.warning("the peer's pool of %d bytes cannot be mapped: %s", event.nbytes, error)
                os.close(fd)
                self._tell(PeerPoolMapped(0))
                return
        with self.in_use.by_nobody():  # a step that copies looks its pool up by number more than once
            self.peer_pool, self.peer_pool_number = pool, event.number
        self._tell(PeerPoolMapped(event.number))

    def _map_peer_pool(self, event: PeerPool, fd: int) -> Pool:
        if event.device_handle:
            if self._device_pools is None:
                raise TransferError("it is device memory, and this worker has no GPU")
            return Pool(
                fd, event.nbytes, on_device=True, device=self._device_pools.open(event.device_handle, event.nbytes)
            )
        pool = Pool(fd, event.nbytes)
        pool.map_pages()
        self._page_locks.lock(pool)
        return pool

    def _drop_peer_pool(self) -> None:
        """The mapping goes with the last view of it."""
        with self.in_use.by_nobody():
            pool, self.peer_pool, self.peer_pool_number = self.peer_pool, None, 0
        if pool is not None:
            if not pool.on_device:
                self._page_locks.unlock(pool)
            pool.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _hears_from(self, sock: socket.socket) -> bool:
        """Wait for a new agent's first message; False if it dies, takes too long or is not wanted any more."""
        assert self._process is not None
        deadline_s = time.monotonic() + _START_S
        sock.settimeout(_WATCH_S)
        while self._process.poll() is None and not self._closing.is_set() and time.monotonic() < deadline_s:
            try:
                return bool(sock.recv(MAX_MESSAGE_BYTES))
            except socket.timeout:  # not yet TimeoutError on Python 3.9
                continue
            except OSError:
                break
        return False

    def _wait_for_exit(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("the transfer agent did not end within %.0f s and is killed", _STOP_S)


def _create_pool(settings: AgentSettings, device_pools: DevicePools | None) -> Pool:
    """Prefill's is device memory where that is asked for; decode's own never is, it takes what the engine brings."""
    if settings.transport != CUDA_IPC or settings.role != "prefill":
        return Pool.create(settings.pool_nbytes)
    if device_pools is None:
        raise TransferError(
            "MOONCAKE_V0_TRANSPORT is cuda_ipc, and this worker has no GPU", fix="unset it, or set auto, engine or shm"
        )
    return Pool.create(settings.pool_nbytes, device_pools.allocate)
