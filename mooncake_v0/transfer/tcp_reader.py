"""Reads a peer's memory over tcp from its engine, with a socket of our own instead of an engine's reading half.

The protocol is the engine's (mooncake-transfer-engine 0.3.3.post1 and .post2, tcp_transport.cpp): a connection carries one
request, 24 bytes with the number of bytes, the address and the direction, and then the bytes. An engine that reads copies
64 KiB at a time in its only tcp thread, while the thread that called it spins; it cannot be interrupted, waits minutes for a
host that drops packets, and after its time-out still writes what arrives. One thread that sleeps until PIECE_BYTES are there
takes 0.35 to 0.65 of the engine's time on two cores and 0.75 to 0.85 on 16, with a seventh and a third of the processor time
(18 to 144 MiB over loopback), and a second such thread adds nothing: the serving engine has one tcp thread.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import time

from mooncake_v0.errors import EngineError, TransferError
from mooncake_v0.transfer.side_channel import resolve

PIECE_BYTES = 512 << 10  # the kernel takes less where its limit for a receive buffer (tcp_rmem) is below twice that
STALLED_S = 5.0  # for the connection, and for each piece
LIMIT_S = 30.0  # for a whole read

_REQUEST = struct.Struct("<QQB7x")  # number of bytes, address, direction
_READ = 0


class TcpReader:
    """Reads from the engine that serves at host:port; a read that failed writes nothing any more."""

    cancels = True

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def read(self, segment_name: str, local_address: int, remote_address: int, nbytes: int) -> None:
        """Copy nbytes from the peer's memory into ours; returns when all bytes are here.

        segment_name: what the peer is called in errors. Raises EngineError, at the latest after LIMIT_S and STALLED_S; the
        target then holds some of the bytes.
        """
        target = memoryview((ctypes.c_ubyte * nbytes).from_address(local_address)).cast("B")
        try:
            with socket.socket() as connection:
                connection.settimeout(STALLED_S)
                connection.connect((resolve(self._host), self._port))
                connection.sendall(_REQUEST.pack(nbytes, remote_address, _READ))
                _receive(connection, target)
        except (OSError, TransferError) as error:
            reason = f"no connection in {STALLED_S:g} s" if isinstance(error, TimeoutError) else error
            raise EngineError(
                f"read of {nbytes} bytes from segment {segment_name!r} at {self._host}:{self._port} failed: {reason}",
                fix="check that the peer runs and that nothing between the hosts blocks this port",
            ) from error


def _receive(connection: socket.socket, target: memoryview) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    done = awaited = 0
    while done < len(target):
        if time.monotonic() > deadline_s:
            raise ConnectionAbortedError(f"only {done} bytes came in {LIMIT_S:g} s")
        if awaited != (piece := min(PIECE_BYTES, len(target) - done)):
            awaited = piece
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)
        try:
            received = connection.recv_into(target[done:])
        except TimeoutError:
            reason = f"after {done} bytes fewer than {awaited} more came in {STALLED_S:g} s"
            raise ConnectionAbortedError(reason) from None
        if not received:
            raise ConnectionAbortedError(f"the connection ended after {done} bytes")
        done += received
