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

import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from typing import Sequence

from mooncake_v0.metadata.probes import ANSWERS, REFUSED, probe_all
from mooncake_v0.metadata.registry import InstanceRecord
from mooncake_v0.metadata.segments import Segment

ALIVE = "alive"
STALE = "stale"
UNSURE = "unsure"


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
        record, means_us = segment.record, self._means_us(segment, hostname)
        if probe == ANSWERS and means_us:
            return Liveness(ALIVE, f"port {segment.probe_port} answers")
        age_s = None if record is None else now - record.refreshed_at
        if probe == REFUSED and means_us:
            if record is not None and record.is_fresh(now) and not _is_gone(record, hostname):
                return Liveness(UNSURE, f"port {segment.probe_port} refuses, but its agent was seen {age_s:.0f} s ago")
            return Liveness(STALE, f"nobody listens on {segment.host}:{segment.probe_port}")
        if record is not None and record.is_fresh(now):
            return Liveness(ALIVE, f"its agent was seen {age_s:.0f} s ago")
        if self._is_long_gone(record, probe, age_s):
            return Liveness(STALE, f"{probe}, and its agent was last seen {age_s:.0f} s ago")
        if not means_us:
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
    """Probe all segments at once; the verdicts by name. For each 4000 ports that do not answer it takes a second."""
    weigh, now, hostname = judge or Judge(), time.time(), socket.gethostname()
    addresses = [(s.host or "", s.probe_port or 0) for s in segments]
    found = probe_all(address for address in addresses if address[0] and 1 <= address[1] <= 65535)
    return {
        segment.name: weigh.liveness(
            segment, found.get(address, "its address is not known"), now=now, hostname=hostname
        )
        for segment, address in zip(segments, addresses)
    }


def is_loopback(host: str) -> bool:
    """Whether an address or name means the own host everywhere."""
    try:
        return socket.inet_pton(socket.AF_INET, host)[0] == 127  # most addresses; ipaddress takes ten times as long
    except (OSError, ValueError):  # ValueError: a zero byte
        pass
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
