"""The ZeroMQ shell around the messages between agents: sockets, identities, limits, and the optional shared secret.

Every agent binds a ROUTER at its side-channel port; decode's agent connects a DEALER to prefill's. One thread (the
agent's main loop) owns both. Nothing here waits: sends drop when a peer's queue is full, which the peer's deadlines
cover.

With a shared secret both key pairs of libzmq's CURVE are derived from it. The server's public key never crosses the
wire, so only a holder of the secret can open a connection or answer one; frames are encrypted, authenticated and cannot
be replayed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import socket

import zmq
import zmq.utils.z85

from mooncake_v0.errors import ProtocolError, TransferError
from mooncake_v0.transfer.messages import MAX_MESSAGE_BYTES, Message, PeerMessage, decode_peer, encode

logger = logging.getLogger(__name__)

_QUEUED_MESSAGES = 10_000
_BACKLOG = 4096  # with libzmq's 100, strangers who connect in masses cost the peer a second for each lost SYN


class SideChannel:
    """The listener of one agent, and its connection to the peer where this is decode's agent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, secret: bytes | None = None) -> None:
        self._context = context
        self._secret = secret
        self.listener: zmq.Socket[bytes] | None = None
        self.dialer: zmq.Socket[bytes] | None = None
        self.rejected = 0  # messages that were not ours
        self._dialed = ""

    def bind(self, host: str, port: int) -> None:
        """Listen for peers and status requests; TransferError when the address is not ours or taken."""
        listener = self._socket(zmq.ROUTER)
        if self._secret is not None:
            listener.curve_server = True
            listener.curve_publickey, listener.curve_secretkey = _curve_pair(self._secret, b"server")
        try:
            listener.bind(f"tcp://{resolve(host)}:{port}")
        except zmq.ZMQError as error:
            listener.close(linger=0)
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error}"
            raise TransferError(
                f"side channel {host}:{port} {why}",
                fix="stop the other process, or correct prefill_url or decode_url so that it names this host",
            ) from error
        self.listener = listener

    def dial(self, host: str, port: int) -> None:
        """Connect to the peer's listener; libzmq goes on trying until it is there."""
        dialer = self._socket(zmq.DEALER)
        dialer.reconnect_ivl = 100
        dialer.reconnect_ivl_max = 1000
        dialer.connect_timeout = 2000
        if self._secret is not None:
            dialer.curve_serverkey, _ = _curve_pair(self._secret, b"server")
            dialer.curve_publickey, dialer.curve_secretkey = _curve_pair(self._secret, b"client")
        self._dialed = f"tcp://{resolve(host)}:{port}"
        dialer.connect(self._dialed)
        self.dialer = dialer

    def follow(self, ip: str, port: int) -> None:
        """Connect to the peer's new address, if it has one now (a pod that was started again elsewhere)."""
        address = f"tcp://{ip}:{port}"
        if self.dialer is not None and address != self._dialed:
            logger.info("the peer is now at %s", address)
            self.dialer.disconnect(self._dialed)
            self.dialer.connect(address)
            self._dialed = address

    def send(self, message: Message, identity: bytes | None = None) -> None:
        """To the connected listener, or to the peer with this identity at our listener. Dropped when it is gone."""
        try:
            if identity is None:
                assert self.dialer is not None
                self.dialer.send(encode(message), zmq.NOBLOCK)
            else:
                assert self.listener is not None
                self.listener.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("a full queue drops %s", type(message).__name__)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise

    def receive(self) -> list[tuple[bytes | None, PeerMessage]]:
        """All messages that are here now, with the sender's identity (None: the listener we dialed). Junk is counted."""
        found: list[tuple[bytes | None, PeerMessage]] = []
        for sock in (self.listener, self.dialer):
            while sock is not None and len(found) < 1000:
                try:
                    frames = sock.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                identity = frames[0] if sock is self.listener else None
                body = frames[1:] if sock is self.listener else frames
                try:
                    if len(body) != 1:
                        raise ProtocolError(f"a message of {len(body)} frames")
                    found.append((identity, decode_peer(body[0])))
                except ProtocolError as error:
                    self.rejected += 1
                    logger.debug("rejected: %s", error)
        return found

    def close(self) -> None:
        for sock in (self.listener, self.dialer):
            if sock is not None:
                sock.close(linger=0)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        sock.linger = 0
        sock.maxmsgsize = MAX_MESSAGE_BYTES
        sock.sndhwm = sock.rcvhwm = _QUEUED_MESSAGES
        sock.handshake_ivl = 2000
        sock.backlog = _BACKLOG
        sock.tcp_keepalive = 1
        return sock


def resolve(host: str) -> str:
    """The IPv4 address of a host name; libzmq would take an unknown name for an interface."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise TransferError(f"host {host!r} cannot be resolved: {error}", fix="use an IPv4 address") from error


def _curve_pair(secret: bytes, label: bytes) -> tuple[bytes, bytes]:
    private = hashlib.blake2b(secret, digest_size=32, person=b"mooncake-v0", salt=label).digest()
    encoded = zmq.utils.z85.encode(private)
    return zmq.curve_public(encoded), encoded
