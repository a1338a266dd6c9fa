"""The transfer agent: one process per worker rank that owns the engine, the side channel and the lookup buffer.

A worker's `AgentClient` starts it as ``python -m mooncake_v0.transfer.agent`` with three inherited descriptors, the pool
and two sockets (calls, events), and its settings as JSON. It ends when the worker closes the socket, dies or sends
SIGTERM; each way it removes its keys from the metadata store. When it dies or hangs the worker replaces it.

The engine's data port gives every peer read and write access to the whole memory of the process it lives in: here that is
the pool and nothing else of value.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import zmq

from mooncake_v0.config.model import RankPorts
from mooncake_v0.errors import EngineError, ProtocolError
from mooncake_v0.metadata.registry import InstanceRecord
from mooncake_v0.transfer.agent_settings import AUTO, ENGINE, AgentSettings
from mooncake_v0.transfer.checksums import Hasher, is_wanted
from mooncake_v0.transfer.conversation import Conversation
from mooncake_v0.transfer.decode_side import DecodeSide
from mooncake_v0.transfer.engine import EngineSettings, check_descriptor, engine_takes
from mooncake_v0.transfer.engine_thread import READY, STARTING, EngineThread, ReadResult, engine_opener
from mooncake_v0.transfer.key_keeper import KeyKeeper, make_record
from mooncake_v0.transfer.lookup_buffer import LookupBuffer
from mooncake_v0.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Hello,
    Message,
    PeerMessage,
    PeerPoolMapped,
    Release,
    Report,
    Status,
    Welcome,
    WorkerStatus,
    WorkerStatusRequest,
    encode,
)
from mooncake_v0.transfer.peer import Peer
from mooncake_v0.transfer.peer_pool import PeerPoolMapping
from mooncake_v0.transfer.pool import Pool
from mooncake_v0.transfer.prefill_side import PrefillSide
from mooncake_v0.transfer.same_host import PoolOffer
from mooncake_v0.transfer.tcp_reader import TcpReader
from mooncake_v0.transfer.worker_checks import MAX_COUNTERS, decode_checked

logger = logging.getLogger("mooncake_v0.agent")

TICK_S = 0.25
IDLE_TICK_S = 1.0  # without a peer for some time: another processor's cache lines are worth more than a quick look
IDLE_AFTER_S = 10.0
REPORT_EVERY_S = 1.0
STUCK_READ_S = 15.0  # only a connect to a host that drops packets lasts longer (133 s); nothing can interrupt it
CLEAR_AT_ONCE_BYTES = 8 << 20  # a millisecond: an engine step may wait for an answer
EXIT_REPLACE_ME = 75
_PR_SET_PDEATHSIG = 1


class Agent:
    """The main loop: one thread that owns the sockets and the buffer; the engine has a thread of its own."""

    def __init__(self, settings: AgentSettings, worker: socket.socket, events: socket.socket, pool: Pool) -> None:
        self.settings = settings
        self.epoch = os.urandom(8).hex()
        self.engine_state = STARTING
        self.stopping = False
        self._worker = worker
        self._events = events
        self._next_report_s = 0.0
        self._reported: Status | None = None
        self._had_peer_at_s = time.monotonic()
        self._pool = pool
        pool.has_peer = False
        self._peer = Peer()
        self._buffer: LookupBuffer
        self._worker_counters: dict[str, float] = {}
        self._poller = zmq.Poller()
        self._talk = Conversation(settings, self.epoch, self._peer, self._poller, self)
        self._keeper = KeyKeeper(settings.config.metadata_server, self._record())
        theirs = settings.config.ports(settings.peer_role, settings.rank)
        is_tcp = settings.config.protocol == "tcp"
        self._engine = EngineThread(self._engine_opener(), TcpReader(theirs.host, theirs.data) if is_tcp else None)
        is_checked = is_wanted(settings.checksum, settings.config.protocol) and not pool.on_device
        self._hasher = Hasher(pool) if is_checked else None
        self._side: PrefillSide | DecodeSide
        self._pool_offer: PoolOffer | None = None
        self._peer_pool: PeerPoolMapping | None = None
        if settings.role == "prefill":
            self._buffer = LookupBuffer(
                pool.nbytes,
                ttl_s=settings.ttl_s,
                on_free=lambda entry: pool.set_generation(entry.offset, 0),
                clear=pool.clear,
            )
            self._side = PrefillSide(self._buffer, self._peer, pool, send=self._talk.send, hasher=self._hasher)
            if settings.transport != ENGINE:
                handle = bytes.fromhex(settings.device_handle)
                self._pool_offer = self._talk.pool_offer = PoolOffer(pool, handle)
        else:
            self._buffer = LookupBuffer(pool.nbytes, ttl_s=settings.ttl_s, clear=pool.clear)
            self._side = DecodeSide(
                self._buffer,
                self._peer,
                pool,
                send=self._talk.send,
                submit=self._engine.submit,
                cancel=self._engine.cancel,
                hasher=self._hasher,
                may_stop_checking=settings.checksum == AUTO,
            )
            self._peer_pool = PeerPoolMapping(settings.transport, events, self._side.mapped)

    def run(self) -> int:
        """Until the worker goes or SIGTERM comes; returns the exit code. The keys are removed however it ends."""
        try:
            return self._run()
        finally:
            self._close()

    def _run(self) -> int:
        self._poller.register(self._worker.fileno(), zmq.POLLIN)
        self._poller.register(self._engine.wake_up.fileno(), zmq.POLLIN)
        if self._hasher is not None:
            self._poller.register(self._hasher.wake_up.fileno(), zmq.POLLIN)
            self._hasher.start()
        if self._pool_offer is not None:
            self._poller.register(self._pool_offer.listener.fileno(), zmq.POLLIN)
        self._reply(WorkerStatus(0, self.status()))  # the first message: calls may come
        next_tick_s = 0.0
        code = 0
        while not self.stopping:
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                next_tick_s = now_s + self._tick_s(now_s)
                code = self._tick(now_s)
                if code:
                    break
            self._poller.poll(0 if self._buffer.clear_some(CLEAR_AT_ONCE_BYTES) else self._wait_ms(next_tick_s))
            if isinstance(self._side, DecodeSide):
                self._side.answer_in_time(time.monotonic())
            self._serve_worker()
            self._serve_engine()
            for running in self._hasher.take_complete() if self._hasher is not None else ():
                self._side.on_hashed(running)
            self._talk.serve(self.engine_state == READY)
            if self._pool_offer is not None:
                self._pool_offer.serve()
        return code

    def stop(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self.stopping = True

    # --- timing -------------------------------------------------------------------------------------------------------

    def _wait_ms(self, next_tick_s: float) -> int:
        deadline_s = next_tick_s
        if isinstance(self._side, DecodeSide):
            deadline_s = min(deadline_s, self._side.next_deadline_s() or deadline_s)
        return max(0, math.ceil((deadline_s - time.monotonic()) * 1000))

    def _tick_s(self, now_s: float) -> float:
        if self._peer.up or len(self._buffer) or self.engine_state != READY:
            self._had_peer_at_s = now_s
        return IDLE_TICK_S if now_s - self._had_peer_at_s > IDLE_AFTER_S else TICK_S

    def _tick(self, now_s: float) -> int:
        if self._talk.listen() and self._engine.ident is None:
            self._engine.start()
        if now_s - (self._engine.reading_since or now_s) > STUCK_READ_S:
            logger.error("a read has hung for more than %.0f s: this agent is replaced", STUCK_READ_S)
            return EXIT_REPLACE_ME
        if isinstance(self._side, DecodeSide) and self._side.quarantined_bytes * 2 > self._pool.nbytes:
            logger.error("timed-out reads block half of the buffer: this agent is replaced")
            return EXIT_REPLACE_ME
        self._talk.tick(now_s, self.engine_state == READY)
        if self._peer_pool is not None:
            self._peer_pool.tick(now_s)
        self._side.tick(now_s)
        if now_s >= self._next_report_s:
            self._next_report_s = now_s + REPORT_EVERY_S
            self._report()
        return 0

    def _report(self) -> None:
        """Tell the worker what has changed; its own counters it knows."""
        status = self._status(self._own_counters())
        if status != self._reported:
            with contextlib.suppress(OSError):  # a worker that does not read them has other troubles
                self._events.send(encode(Report(status)))
                self._reported = status

    # --- worker and engine --------------------------------------------------------------------------------------------

    def _serve_worker(self) -> None:
        while not self.stopping:
            try:
                data = self._worker.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.stopping = True
                return
            message = decode_checked(data)
            if isinstance(message, WorkerStatusRequest):
                self._reply(WorkerStatus(message.call, self.status()))
                continue
            if isinstance(message, PeerPoolMapped):
                if self._peer_pool is not None:
                    self._peer_pool.on_mapped(message.number)
                continue
            if isinstance(message, Release):
                self._count(message.counters)
            self._side.on_worker(message, self._reply)

    def _count(self, counters: dict[str, float]) -> None:
        for name, value in counters.items():
            if name in self._worker_counters or len(self._worker_counters) < MAX_COUNTERS:
                self._worker_counters[name] = self._worker_counters.get(name, 0) + value

    def _reply(self, message: Message) -> None:
        try:
            self._worker.send(encode(message))
        except BlockingIOError:
            logger.error("the worker does not read its answers")
        except OSError:
            self.stopping = True

    def _serve_engine(self) -> None:
        for result in self._engine.take_results():
            if isinstance(result, ReadResult):
                assert isinstance(self._side, DecodeSide)
                self._side.on_read(result)
            elif result != self.engine_state:
                self.engine_state = result
                if result == READY:
                    logger.info(
                        "engine %s is ready (%s)", self.settings.ports.segment_name, self.settings.config.protocol
                    )
                    self._keeper.start()
                else:
                    logger.warning("no transfer: engine %s", result)

    # --- what the conversation with the peer tells --------------------------------------------------------------------

    def on_peer_up(self, theirs: Hello) -> None:
        self._pool.has_peer = True
        self._side.on_peer_up()
        if self._peer_pool is not None and isinstance(self._side, DecodeSide) and isinstance(theirs, Welcome):
            self._side.can_read = not theirs.pool_on_device
            self._peer_pool.connect(theirs.pool_socket, theirs.pool_nonce, theirs.pool_on_device)

    def on_peer_down(self) -> None:
        self._pool.has_peer = False
        self._side.on_peer_down()
        if self._peer_pool is not None:
            self._peer_pool.lose(time.monotonic())

    def on_peer(self, message: PeerMessage) -> None:
        self._side.on_peer(message)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        return self._status({**self._own_counters(), **self._worker_counters})

    def _own_counters(self) -> dict[str, float]:
        counters: dict[str, float] = {**self._buffer.counters, "rejected_messages": self._talk.rejected}
        if isinstance(self._side, DecodeSide):
            counters["quarantined_bytes"] = self._side.quarantined_bytes
        return counters

    def _status(self, counters: dict[str, float]) -> Status:
        return Status(
            role=self.settings.role,
            rank=self.settings.rank,
            epoch=self.epoch,
            engine=self.engine_state,
            peer=self._peer.description,
            peer_epoch=self._peer.epoch if self._peer.up else "",
            buffer_bytes=self._buffer.used_bytes,
            buffer_limit_bytes=self._buffer.limit_bytes,
            entries=len(self._buffer) + (len(self._side.mapped) if isinstance(self._side, DecodeSide) else 0),
            counters={name: float(value) for name, value in counters.items()},
            transport=self._peer_pool.transport if self._peer_pool is not None else "",
            in_flight=self._side.in_flight,
        )

    def _record(self) -> InstanceRecord:
        """What the metadata store's registry says of this agent."""
        settings, ports = self.settings, self.settings.ports
        return make_record(
            segment=ports.segment_name,
            role=settings.role,
            rank=settings.rank,
            host=ports.host,
            handshake=ports.handshake,
            side_channel=ports.side_channel,
            protocol=settings.config.protocol,
            epoch=self.epoch,
            deployment=settings.config.digest(),
            api_url=settings.api_url,
        )

    def _engine_opener(self) -> Any:
        config, ports = self.settings.config, self.settings.ports
        settings = EngineSettings(ports.segment_name, config.metadata_server, config.protocol, config.device_names)
        return engine_opener(
            settings,
            self._pool.address,
            self._pool.host_nbytes,
            before=self._check_before_start,
            open_gateway=None if engine_takes(config.metadata_server) else self._keeper.open_gateway,
            after=lambda: check_descriptor(self._keeper.fetch_descriptor(), settings),
        )

    def _check_before_start(self) -> None:
        check_ports_free(self.settings.ports)
        self._keeper.check_name_free()

    def _close(self) -> None:
        self._keeper.stop()
        if self._engine.is_alive():
            self._engine.stop(timeout_s=2.0)
        self._keeper.close()
        self._talk.close()
        if self._pool_offer is not None:
            self._pool_offer.close()


def check_ports_free(ports: RankPorts) -> None:
    """Refuse before the engine overwrites the keys of a live process of the same name (it only fails afterwards)."""
    for port in (ports.handshake, ports.data):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ports.host, port))
            except OSError as error:
                raise EngineError(
                    f"{ports.host}:{port} cannot be bound: {error.strerror}",
                    fix="stop the process that uses it, or correct prefill_url or decode_url",
                ) from error


def _raise_file_limit() -> None:
    """As many descriptors as the system allows: each read is a connection, and strangers can hold many at the port."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str]) -> int:
    """``python -m mooncake_v0.transfer.agent POOL_FD CALLS_FD EVENTS_FD``; the settings come on standard input."""
    # SIGTERM when the worker's supervisor thread dies, however it dies
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _raise_file_limit()
    pool_fd, worker_fd, events_fd = (int(text) for text in argv)
    settings = AgentSettings.from_json(sys.stdin.read())
    logging.basicConfig(
        level=settings.log_level,
        format=f"%(levelname)s %(asctime)s mooncake-v0 {settings.role}/{settings.rank}] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    worker = socket.socket(fileno=worker_fd)
    worker.setblocking(False)
    events = socket.socket(fileno=events_fd)
    events.setblocking(False)
    pool = Pool(pool_fd, settings.pool_nbytes, on_device=bool(settings.device_handle))
    pool.map_pages()
    agent = Agent(settings, worker, events, pool)
    signal.signal(signal.SIGTERM, agent.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to the worker, whose end ends us
    code = 1
    try:
        code = agent.run()
    except ProtocolError as error:
        logger.error("the worker sent %s", error)
    except Exception:
        logger.exception("this agent ends")
    # The engine's threads may hang in a connect; its keys are removed by now or cannot be.
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
