"""Who listens: TCP connects to many addresses at once, 10,000 of this host in a tenth of a second.

Plain sockets and epoll, since a task of asyncio for each address costs more than its connect.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import time
from contextlib import contextmanager
from typing import Iterable, Iterator, Tuple

from mooncake_v0.at_once import at_once

CONNECT_TIMEOUT_S = 1.0
FEW_CONNECTS = 500  # within the 1024 files that a process may have open everywhere
MAX_CONNECTS = 4000
MAX_RESOLVERS = 32

ANSWERS = "answers"
REFUSED = "refused"

Address = Tuple[str, int]


def probe_all(addresses: Iterable[Address]) -> dict[Address, str]:
    """ANSWERS, REFUSED or, in words, what else came of a connect to each address; ports are 1..65535."""
    wanted = set(addresses)
    found: dict[Address, str] = {}
    known = _resolve({host for host, _ in wanted})
    targets = []
    for address in wanted:
        ip = known[address[0]]
        if ip is None:
            found[address] = f"the host name {address[0]!r} cannot be resolved"
        else:
            targets.append((address, ip))
    with _files_for(len(targets)) as most:
        _Connects(found, most).run(iter(targets))
    return found


@contextmanager
def _files_for(count: int) -> Iterator[int]:
    """How many connects may be under way at once; for more than a few, more files may be open meanwhile."""
    if count <= FEW_CONNECTS:
        yield FEW_CONNECTS
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(count, MAX_CONNECTS) + FEW_CONNECTS  # besides what is open already
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    is_raised = soft != resource.RLIM_INFINITY and soft < limit
    if is_raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield max(FEW_CONNECTS, limit - FEW_CONNECTS)
    finally:
        if is_raised:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class _Connects:
    """Connects under way, oldest first: (socket, address, deadline) by file descriptor."""

    def __init__(self, found: dict[Address, str], most: int) -> None:
        self._found = found
        self._most = most
        self._open: dict[int, tuple[socket.socket, Address, float]] = {}

    def run(self, targets: Iterator[tuple[Address, str]]) -> None:
        with select.epoll() as epoll:
            while self._start(targets, epoll):
                left_s = next(iter(self._open.values()))[2] - time.monotonic()
                for descriptor, _ in epoll.poll(max(0.0, left_s)):
                    self._finish(descriptor)
                self._expire()

    def _start(self, targets: Iterator[tuple[Address, str]], epoll: select.epoll) -> bool:
        """Fill up to `most`; False when none is under way any more."""
        while len(self._open) < self._most:
            target = next(targets, None)
            if target is None:
                break
            address, ip = target
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            try:
                probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                code = probe.connect_ex((ip, address[1]))
                if code == errno.EINPROGRESS:
                    # this host, and hosts nearby, refuse within the call: it can be asked for before epoll is told
                    code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or code
            except OSError as error:
                self._found[address] = _meaning(error.errno or 0, address)
                continue
            if code == errno.EINPROGRESS:
                self._open[probe.fileno()] = (probe, address, time.monotonic() + CONNECT_TIMEOUT_S)
                epoll.register(probe.fileno(), select.EPOLLOUT)
            else:
                self._end(probe, address, code)
        return bool(self._open)

    def _finish(self, descriptor: int) -> None:
        probe, address, _ = self._open.pop(descriptor)
        self._end(probe, address, probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _end(self, probe: socket.socket, address: Address, code: int) -> None:
        with probe:
            # nobody listens where a connect met itself: its own port was the one that was asked for
            met_itself = code == 0 and probe.getsockname() == probe.getpeername()
            self._found[address] = _meaning(errno.ECONNREFUSED if met_itself else code, address)

    def _expire(self) -> None:
        now = time.monotonic()
        for descriptor, (probe, (host, port), deadline) in list(self._open.items()):
            if deadline > now:
                break
            del self._open[descriptor]
            probe.close()
            self._found[(host, port)] = f"{host}:{port} does not answer"


def _meaning(code: int, address: Address) -> str:
    if code == 0:
        return ANSWERS
    if code == errno.ECONNREFUSED:
        return REFUSED
    return f"{address[0]}:{address[1]} cannot be reached: {os.strerror(code)}"


def _resolve(hosts: set[str]) -> dict[str, str | None]:
    known: dict[str, str | None] = {host: host for host in hosts if _is_literal(host)}
    names = hosts - set(known)
    if names:
        known.update(zip(names, at_once(_look_up, names, MAX_RESOLVERS)))
    return known


def _is_literal(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return True
        except (OSError, ValueError):  # ValueError: a zero byte
            continue
    return False


def _look_up(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError):  # ValueError: a name that cannot be one, with a zero byte for example
        return None
