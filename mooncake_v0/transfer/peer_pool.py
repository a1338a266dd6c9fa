"""Decode's agent and the pool of its peer on the same host: fetched, handed to the worker, used once that has mapped it.

The agent itself never touches the pool's bytes. Fetching runs in a thread, since a peer may answer late; mapping and page
locks take the worker's supervisor thread, never its engine step. Until the worker says that it has mapped the pool, and
whenever any of this fails, entries come through the engine; those of a pool in device memory then do not come at all.
"""

from __future__ import annotations

import logging
import socket
from concurrent.futures import Future, ThreadPoolExecutor

from mooncake_v0.errors import TransferError
from mooncake_v0.transfer.agent_settings import CUDA_IPC, ENGINE, SHM
from mooncake_v0.transfer.mapped_entries import MappedEntries
from mooncake_v0.transfer.messages import PeerPool, encode
from mooncake_v0.transfer.same_host import FetchedPool, fetch_pool

logger = logging.getLogger(__name__)

NONE = "none"
KEEP_S = 5.0  # how long the pool of a lost peer stays mapped: an agent that was started again has the same one


class PeerPoolMapping:
    """One per decode agent. events: the socket to the worker's supervisor; entries: told when they can be used."""

    def __init__(self, wanted: str, events: socket.socket, entries: MappedEntries) -> None:
        self._wanted = wanted
        self._events = events
        self._entries = entries
        self._fetching: Future[FetchedPool] | None = None
        self._sent: FetchedPool | None = None
        self._number = 0
        self._on_device = False
        self._lost_at_s: float | None = None
        self._executor = ThreadPoolExecutor(1, "peer-pool")
        self.transport = ""

    def connect(self, name: str, nonce: bytes, on_device: bool) -> None:
        """A peer was welcomed. name: where it offers its pool, empty if it does not; on_device: if that is device memory."""
        self._lost_at_s = None
        self._on_device = on_device
        self._fetching = self._sent = None
        if self._wanted == ENGINE or not name:
            self._use_engine("the peer does not offer its pool" if not name else "MOONCAKE_V0_TRANSPORT=engine")
        else:
            self._fetching = self._executor.submit(fetch_pool, name, nonce)

    def lose(self, now_s: float) -> None:
        self.transport = ""
        self._fetching = self._sent = None
        self._lost_at_s = now_s

    def tick(self, now_s: float) -> None:
        if self._fetching is not None and self._fetching.done():
            done, self._fetching = self._fetching, None
            try:
                self._hand_over(done.result())
            except (TransferError, OSError) as error:
                self._use_engine(str(error))
        if self._lost_at_s is not None and now_s - self._lost_at_s > KEEP_S:
            self._lost_at_s = None
            if self._number:
                self._events.send(encode(PeerPool(0, 0)))

    def on_mapped(self, number: int) -> None:
        """The worker's answer; of an earlier pool it may come late. 0: it cannot."""
        if number == 0 and self._sent is not None:
            self._use_engine("the worker cannot map the peer's pool")
        elif number == self._number and self._sent is not None:
            self._entries.activate(number, self._sent.address, self._sent.nbytes)
            self.transport = CUDA_IPC if self._sent.device_handle else SHM
            logger.info(
                "the peer is on this host: its pool of %d bytes is mapped (%s)", self._sent.nbytes, self.transport
            )

    def _hand_over(self, pool: FetchedPool) -> None:
        try:
            self._number += 1
            message = PeerPool(self._number, pool.nbytes, pool.device_handle)
            socket.send_fds(self._events, [encode(message)], [pool.fd])
            self._sent = pool
        finally:
            pool.close()

    def _use_engine(self, why: str) -> None:
        self.transport = NONE if self._on_device else ENGINE
        if self._on_device:
            logger.error(
                "no KV transfer: prefill's pool is device memory (its MOONCAKE_V0_TRANSPORT is cuda_ipc) and is not to be "
                "had here: %s",
                why,
            )
        elif self._wanted in (SHM, CUDA_IPC):
            logger.warning("entries come through the engine although %s is wanted: %s", self._wanted, why)
        else:
            logger.debug("entries come through the engine: %s", why)
