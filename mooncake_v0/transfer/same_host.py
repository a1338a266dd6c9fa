"""Hands prefill's pool to a decode agent on the same host, which then needs no network and no copy of its own.

Prefill listens at an abstract Unix socket, whose name travels in its Welcome. Such names belong to a network namespace:
a peer on another host, or in a container with a network of its own, finds nobody there and reads through the engine. The
descriptor goes to processes of the same user only, who could open it under /proc as well. Decode believes that the
memory is its peer's when the nonce in it is the one that the Welcome named.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from mooncake_v0.errors import TransferError
from mooncake_v0.transfer.pool import ALIGNMENT_BYTES, NONCE_BYTES, Pool, shared_nbytes

FETCH_TIMEOUT_S = 2.0
_BACKLOG = 16
HANDLE_BYTES = 64  # of a CUDA IPC handle (CU_IPC_HANDLE_SIZE)
_OFFER = struct.Struct(f"<QQ{HANDLE_BYTES}s")  # address of the pool in prefill's agent, size, handle or zeros
_CREDENTIALS = struct.Struct("3i")


class PoolOffer:
    """Prefill's side: a listener that the agent's loop serves. device_handle: of a pool in device memory."""

    def __init__(self, pool: Pool, device_handle: bytes = b"") -> None:
        self.name = f"mooncake-v0-pool-{os.urandom(8).hex()}"
        self.nonce = pool.nonce = os.urandom(NONCE_BYTES)
        self._pool = pool
        self._device_handle = device_handle
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.setblocking(False)
        self.listener.bind(b"\0" + self.name.encode())
        self.listener.listen(_BACKLOG)

    def serve(self) -> None:
        """Answer those who wait; never blocks."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BACKLOG):
                connection, _ = self.listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.setblocking(False)
                    if _user_of(connection) == os.geteuid():
                        offer = _OFFER.pack(self._pool.address, self._pool.nbytes, self._device_handle)
                        socket.send_fds(connection, [offer], [self._pool.fd])

    def close(self) -> None:
        self.listener.close()


@dataclass(frozen=True)
class FetchedPool:
    """A peer's pool as decode got it. address: where it lies in prefill's agent, to which the peer's offers refer.

    device_handle: empty for a pool in host memory
    """

    fd: int
    nbytes: int
    address: int
    device_handle: bytes = b""

    def close(self) -> None:
        os.close(self.fd)


def fetch_pool(name: str, nonce: bytes) -> FetchedPool:
    """Ask the peer for its pool. TransferError: not on this host, not of this user, or not what it should be."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(FETCH_TIMEOUT_S)
        try:
            connection.connect(b"\0" + name.encode())
            data, descriptors, _, _ = socket.recv_fds(connection, _OFFER.size, 1)
        except OSError as error:
            raise TransferError(f"the peer's pool is not to be had on this host: {error}") from error
    if not descriptors:
        raise TransferError("the peer's pool is not to be had: the peer runs as another user")
    try:
        return _checked(data, descriptors[0], nonce)
    except (TransferError, OSError, ValueError, struct.error) as error:
        os.close(descriptors[0])
        raise TransferError(f"what the peer offers as its pool is not usable: {error}") from error


def _checked(data: bytes, fd: int, nonce: bytes) -> FetchedPool:
    address, nbytes, handle = _OFFER.unpack(data)
    on_device = any(handle)
    if nbytes % ALIGNMENT_BYTES or os.fstat(fd).st_size != shared_nbytes(nbytes, on_device):
        raise TransferError(f"{nbytes} bytes are announced, the file has {os.fstat(fd).st_size}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise TransferError("it could be made smaller while it is in use")
    if Pool(fd, nbytes, on_device=on_device).nonce != nonce:
        raise TransferError("it has another nonce")
    return FetchedPool(fd, nbytes, address, handle if on_device else b"")


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return int(user)
