"""The talk of an agent with its peer over the side channel: who it is, whether both sides agree, and whether it lives.

Decode dials and keeps the talk going: a Hello until it is welcome, then pings. Prefill answers. Silence ends it, and so
does another epoch: what the earlier process stored is not what its successor would. What a peer says beyond that goes to
the `Listener`, which is the agent.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec
import zmq

from mooncake_v0.errors import TransferError
from mooncake_v0.transfer.agent_settings import AgentSettings
from mooncake_v0.transfer.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    PeerMessage,
    Ping,
    Pong,
    Refused,
    Status,
    StatusRequest,
    Welcome,
)
from mooncake_v0.transfer.peer import PING_EVERY_S, Peer, disagreement, explain_disagreement
from mooncake_v0.transfer.same_host import PoolOffer
from mooncake_v0.transfer.side_channel import SideChannel, resolve

REFUSED_RETRY_S = 2.0
RESOLVE_EVERY_S = 2.0
TAKEN_FOR_S = 3 * PING_EVERY_S


class Listener(Protocol):
    """Who is told. on_peer_up: with the Hello of decode or the Welcome of prefill."""

    def on_peer_up(self, theirs: Hello) -> None: ...
    def on_peer_down(self) -> None: ...
    def on_peer(self, message: PeerMessage) -> None: ...
    def status(self) -> Status: ...


class Conversation:
    """listen() until it is true; then tick() now and then, and serve() whenever the poller says so."""

    def __init__(self, settings: AgentSettings, epoch: str, peer: Peer, poller: zmq.Poller, listener: Listener) -> None:
        self.pool_offer: PoolOffer | None = None  # told to a decode that is welcome
        self._settings = settings
        self._epoch = epoch
        self._peer = peer
        self._poller = poller
        self._listener = listener
        self._channel = SideChannel(zmq.Context(), secret=_read_secret(settings.secret_file))
        self._next_hello_s = 0.0
        self._next_resolve_s = 0.0
        self._resolver = ThreadPoolExecutor(1, "resolver")
        self._resolving: Future[str] | None = None

    @property
    def rejected(self) -> int:
        """Messages that were not ours."""
        return self._channel.rejected

    def listen(self) -> bool:
        """Bind the side channel; False, with the reason in the peer's state, while that cannot be done."""
        if self._channel.listener is None:
            ports = self._settings.ports
            try:
                self._channel.bind(ports.host, ports.side_channel)
            except TransferError as error:
                self._peer.report(str(error))
                return False
            self._poller.register(self._channel.listener, zmq.POLLIN)
        return True

    def tick(self, now_s: float, is_ready: bool) -> None:
        """is_ready: whether our engine has started, without which nobody is greeted."""
        if self._settings.role == "decode" and self._channel.listener is not None:
            self._call_peer(now_s, is_ready)
        if self._peer.silent(now_s):
            self._lose_peer(f"it has been silent for {now_s - self._peer.heard_at_s:.1f} s")

    def serve(self, is_ready: bool) -> None:
        """Take all messages that are here."""
        for identity, message in self._channel.receive():
            if isinstance(message, StatusRequest):
                self._channel.send(self._listener.status(), identity)
            elif isinstance(message, Hello):
                self._greet(identity, message, is_ready)
            elif isinstance(message, (Ping, Pong)):
                self._heard(identity, message)
            elif isinstance(message, Refused):
                if self._settings.role != "decode" or identity is not None:
                    continue  # only the listener that decode dialed may refuse it
                self._next_hello_s = time.monotonic() + REFUSED_RETRY_S
                self._lose_peer(explain_disagreement(message.field, message.theirs, message.ours))
            elif self._peer.up and identity == self._peer.identity:
                self._peer.heard_at_s = time.monotonic()
                self._listener.on_peer(message)

    def send(self, message: Message) -> None:
        """To the peer; dropped when there is none."""
        if self._peer.up:
            self._channel.send(message, self._peer.identity)

    def close(self) -> None:
        self._channel.close()

    # --- decode dials -------------------------------------------------------------------------------------------------

    def _call_peer(self, now_s: float, is_ready: bool) -> None:
        if self._channel.dialer is None:
            self._follow_peer()
        elif self._peer.up:
            self._channel.send(Ping(self._epoch))
        elif is_ready and now_s >= self._next_hello_s:
            self._next_hello_s = now_s + PING_EVERY_S
            self._channel.send(self._hello())
            if now_s >= self._next_resolve_s:
                self._next_resolve_s = now_s + RESOLVE_EVERY_S
                self._follow_peer()

    def _follow_peer(self) -> None:
        """Ask again for the peer's address; in a thread, since a name server may take seconds to say nothing."""
        peer = self._settings.config.ports("prefill", self._settings.rank)
        if self._resolving is None:
            self._resolving = self._resolver.submit(resolve, peer.host)
        elif self._resolving.done():
            asked, self._resolving = self._resolving, None
            try:
                self._connect_to(asked.result(), peer.side_channel)
            except TransferError as error:
                self._peer.report(str(error))

    def _connect_to(self, ip: str, port: int) -> None:
        if self._channel.dialer is not None:
            self._channel.follow(ip, port)
            return
        self._channel.dial(ip, port)
        assert self._channel.dialer is not None
        self._poller.register(self._channel.dialer, zmq.POLLIN)

    # --- greeting -----------------------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        settings = self._settings
        return Hello(
            version=PROTOCOL_VERSION,
            role=settings.role,
            rank=settings.rank,
            tp_size=settings.tp_size,
            epoch=self._epoch,
            segment_name=settings.ports.segment_name,
            config_digest=settings.config.digest(),
            fingerprint=settings.fingerprint,
        )

    def _welcome(self) -> Welcome:
        name, nonce = (self.pool_offer.name, self.pool_offer.nonce) if self.pool_offer else ("", b"")
        on_device = bool(self._settings.device_handle)
        hello = msgspec.structs.asdict(self._hello())
        return Welcome(**hello, pool_socket=name, pool_nonce=nonce, pool_on_device=on_device)

    def _greet(self, identity: bytes | None, theirs: Hello, is_ready: bool) -> None:
        """Prefill answers a Hello with Welcome or Refused; decode takes the Welcome."""
        wrong = disagreement(self._hello(), theirs)
        if self._settings.role == "prefill" and identity is not None and not isinstance(theirs, Welcome):
            if not is_ready or self._is_taken(theirs):
                return
            self._channel.send(Refused(*wrong) if wrong else self._welcome(), identity)
        elif not (self._settings.role == "decode" and identity is None and isinstance(theirs, Welcome)):
            return
        if wrong:
            if not self._peer.up:
                self._peer.report(explain_disagreement(*wrong))
            return
        if self._peer.up and self._peer.epoch != theirs.epoch:
            self._lose_peer("it was restarted")
        if not self._peer.up:
            self._peer.connect(theirs, identity, time.monotonic())
            self._listener.on_peer_up(theirs)
        self._peer.identity = identity
        self._peer.heard_at_s = time.monotonic()

    def _is_taken(self, theirs: Hello) -> bool:
        """Whether another, live decode agent has this prefill already; a restarted one finds its place silent."""
        silent_s = time.monotonic() - self._peer.heard_at_s
        return self._peer.up and self._peer.epoch != theirs.epoch and silent_s < TAKEN_FOR_S

    # --- living -------------------------------------------------------------------------------------------------------

    def _heard(self, identity: bytes | None, message: Ping | Pong) -> None:
        if isinstance(message, Ping):
            if identity is None:
                return
            self._channel.send(Pong(self._epoch), identity)
            if self._peer.up and message.epoch == self._peer.epoch:
                self._peer.identity = identity  # a reconnect gives the same peer a new identity
                self._peer.heard_at_s = time.monotonic()
        elif self._peer.up and identity is None:
            if message.epoch == self._peer.epoch:
                self._peer.heard_at_s = time.monotonic()
            else:
                self._lose_peer("it was restarted")

    def _lose_peer(self, problem: str) -> None:
        was_up = self._peer.up
        self._peer.lose(problem)
        if was_up:
            self._listener.on_peer_down()


def _read_secret(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read().strip()
