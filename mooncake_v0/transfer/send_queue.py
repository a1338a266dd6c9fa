"""On two cores, keeps short what the engine has written to a connection and the kernel has not sent yet.

The engine writes 64 KiB at a time, as long as the kernel takes them (mooncake-transfer-engine 0.3.3.post2,
tcp_transport.cpp). On two cores, one of which the reader's waiting thread burns, whoever writes and whoever reads on loopback
take turns on the other, and megabytes leave its cache meanwhile. With no more than one such piece unsent a read takes 0.75
to 0.85 of the time (18 to 144 MiB, medians of 25 reads in turn). On 16 cores, where both work at once, it took 1.02 to 1.1
of the time. How much may be under way on a long path stays the kernel's decision, other than with a small send buffer.

The option belongs to a socket, and a connection has it from the socket that accepted it (tcp(7), TCP_NOTSENT_LOWAT).
"""

from __future__ import annotations

import os
import socket
import stat
from typing import Container

UNSENT_BYTES = 64 << 10
MAX_CPUS = 2


def is_worth_it(protocol: str) -> bool:
    return protocol == "tcp" and len(os.sched_getaffinity(0)) <= MAX_CPUS


def limit_unsent(ports: Container[int]) -> int:
    """For connections to be accepted on these ports by this process. Returns the number of listening sockets found."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        listening = _listening_socket(int(name))
        if listening is None:
            continue
        with listening:
            if listening.getsockname()[1] in ports:
                listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
                found += 1
    return found


def _listening_socket(number: int) -> socket.socket | None:
    """A descriptor's own copy as a socket object, if it is one that accepts tcp connections."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        copied = os.dup(number)
    except OSError:  # closed meanwhile
        return None
    one = socket.socket(fileno=copied)
    is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
    if is_tcp and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return one
    one.close()
    return None
