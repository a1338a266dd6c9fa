"""Whether a segment's process lives: a TCP connect to its engine port, and its record.

    alive   its port answers, or its record is fresh and nothing speaks against it
    stale   provably dead: its host answers that nobody listens on the port, and no fresh record says otherwise
    unsure  everything else, always with the reason; `prune` leaves these alone

A refused connection proves something only where the address means the same host to us as to the publisher: a published
loopback address proves nothing about another host's process, unless its record names this host, or the caller says so
(`is_local`). A record refreshed in the last 35 s outweighs a refused connection, which a firewall can fake, unless the
record's process is on this host and gone. A stopped process still accepts connections, so it counts as alive.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Sequence

from mooncake_v0.metadata.registry import InstanceRecord
from mooncake_v0.metadata.segments import Segment

ALIVE = "alive"
STALE = "stale"
UNSURE = "unsure"
CONNECT_TIMEOUT_S = 1.0
MAX_CONNECTS = 500

ANSWERS = "answers"
REFUSED = "refused"


@dataclass(frozen=True)
class Liveness:
    """A verdict and, in words, why."""

    status: str
    reason: str


@dataclass(frozen=True)
class Judge:
    """How to weigh what the probes found.

    is_local:              loopback addresses in the store are this host's
    unreachable_after_s:   a segment whose host does not answer at all counts as stale when its record is older than
                           this; None never
    """

    is_local: bool = False
    unreachable_after_s: float | None = None

    def liveness(self, segment: Segment, probe: str, *, now: float, hostname: str) -> Liveness:
        record = segment.record
        if probe == ANSWERS and self._means_us(segment, hostname):
            return Liveness(ALIVE, f"port {segment.probe_port} answers")
        age_s = None if record is None else now - record.refreshed_at
        if probe == REFUSED and self._means_us(segment, hostname):
            if record is not None and record.is_fresh(now) and not _is_gone(record, hostname):
                return Liveness(UNSURE, f"port {segment.probe_port} refuses, but its agent was seen {age_s:.0f} s ago")
            return Liveness(STALE, f"nobody listens on {segment.host}:{segment.probe_port}")
        if record is not None and record.is_fresh(now):
            return Liveness(ALIVE, f"its agent was seen {age_s:.0f} s ago")
        if self._is_long_gone(record, probe, age_s):
            return Liveness(STALE, f"{probe}, and its agent was last seen {age_s:.0f} s ago")
        if not self._means_us(segment, hostname):
            return Liveness(UNSURE, f"published the loopback address {segment.host}; only its own host can tell")
        return Liveness(UNSURE, probe)

    def _means_us(self, segment: Segment, hostname: str) -> bool:
        if self.is_local or segment.host is None or not is_loopback(segment.host):
            return True
        return segment.record is not None and segment.record.hostname == hostname

    def _is_long_gone(self, record: InstanceRecord | None, probe: str, age_s: float | None) -> bool:
        if record is None or age_s is None or self.unreachable_after_s is None or probe in (ANSWERS, REFUSED):
            return False
        return age_s > self.unreachable_after_s


def judge_segments(segments: Sequence[Segment], judge: Judge | None = None) -> dict[str, Liveness]:
    """Probe all segments at once, up to MAX_CONNECTS at a time; the verdicts by name. Takes seconds, not minutes."""
    weigh, now, hostname = judge or Judge(), time.time(), socket.gethostname()
    probes = asyncio.run(_probe_all(segments))
    return {s.name: weigh.liveness(s, probe, now=now, hostname=hostname) for s, probe in zip(segments, probes)}


async def _probe_all(segments: Sequence[Segment]) -> list[str]:
    addresses = [(segment.host, segment.probe_port) for segment in segments]
    found: dict[tuple[str | None, int | None], str] = {}
    waiting = iter({address for address in addresses if address[0] and address[1] and address[1] <= 65535})

    async def work() -> None:
        # the workers share one iterator: thousands of tasks at once would cost more than the connects
        for host, port in waiting:
            found[(host, port)] = await _probe(str(host), int(port or 0))

    await asyncio.gather(*(work() for _ in range(min(MAX_CONNECTS, len(addresses)))))
    return [found.get(address, "its address is not known") for address in addresses]


async def _probe(host: str, port: int) -> str:
    try:
        await asyncio.wait_for(_connect(host, port), CONNECT_TIMEOUT_S)
    except asyncio.TimeoutError:
        return f"{host}:{port} does not answer"
    except socket.gaierror:
        return f"the host name {host!r} cannot be resolved"
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be one, with a zero byte for example
        if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
            return REFUSED
        return f"{host}:{port} cannot be reached: {error}"
    return ANSWERS


async def _connect(host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    family, address = _literal(host, port)
    if family is None:
        family, _, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        await loop.sock_connect(probe, address)


def _literal(host: str, port: int) -> tuple[int | None, Any]:
    try:
        return (socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET), (host, port)
    except ValueError:
        return None, None


def is_loopback(host: str) -> bool:
    """Whether an address or name means the own host everywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _is_gone(record: InstanceRecord, hostname: str) -> bool:
    """Whether the record's process is known to have ended: it ran here and its id is free."""
    if record.hostname != hostname or record.pid <= 0:
        return False
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
