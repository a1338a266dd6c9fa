"""Who is at the other end of the side channel, whether it agrees with us, and whether it is alive.

Used by both sides of the agent. A peer is up from a successful handshake until it is silent for `DOWN_AFTER_S` or its
epoch changes (it was restarted). Every change of state is one log line.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from mooncake_v0.transfer.messages import Hello

logger = logging.getLogger(__name__)

PING_EVERY_S = 0.25
DOWN_AFTER_S = 2.0
NO_PEER = "no_peer"  # why nothing was stored or received

_COMPARED = ("version", "role", "rank", "tp_size", "config_digest")
_MEANING = {
    "config_digest": "the two sides read different mooncake.json files",
    "tp_size": "the two sides use a different --tensor-parallel-size",
    "version": "the two sides run different versions of mooncake-v0",
    "weights": "the two sides serve different weights",
    "model": "the two sides serve different models",
}


@dataclass
class Peer:
    """State of the one peer. identity is its ZeroMQ identity at our listener (None: we dialed it)."""

    up: bool = False
    epoch: str = ""
    segment_name: str = ""
    identity: bytes | None = None
    heard_at_s: float = 0.0
    problem: str = "has not answered yet"
    _logged: str = field(default="", repr=False)

    def connect(self, hello: Hello, identity: bytes | None, now_s: float) -> None:
        self.up, self.epoch, self.segment_name = True, hello.epoch, hello.segment_name
        self.identity, self.heard_at_s, self.problem, self._logged = identity, now_s, "", ""
        logger.info("peer %s is connected (epoch %s)", hello.segment_name, hello.epoch)

    def lose(self, problem: str) -> None:
        self.up = False
        self.report(problem)

    def report(self, problem: str) -> None:
        """Remember why there is no peer; logged when it is news."""
        self.problem = problem
        if problem != self._logged:
            self._logged = problem
            logger.warning("no transfer with the peer: %s; requests are computed here", problem)

    def silent(self, now_s: float) -> bool:
        return self.up and now_s - self.heard_at_s > DOWN_AFTER_S

    @property
    def description(self) -> str:
        return f"up, {self.segment_name}" if self.up else self.problem


def disagreement(ours: Hello, theirs: Hello) -> tuple[str, str, str] | None:
    """The first field on which two sides that must agree do not: (field, ours, theirs)."""
    for name in _COMPARED:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if name == "role":
            if mine == other:
                return name, str(mine), str(other)
        elif mine != other:
            return name, str(mine), str(other)
    for name in sorted(set(ours.fingerprint) | set(theirs.fingerprint)):
        mine, other = ours.fingerprint.get(name, "-"), theirs.fingerprint.get(name, "-")
        if mine != other:
            return name, mine, other
    return None


def explain_disagreement(field_name: str, ours: str, theirs: str) -> str:
    meaning = _MEANING.get(field_name, "the two sides must be started alike")
    return f"{field_name} differs: {ours!r} here, {theirs!r} there ({meaning})"
