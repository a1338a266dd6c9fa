"""What the proxy and the two vLLM instances of a pair say to each other about one request, beside the request itself.

The proxy sends both legs at the same time, with the same `HEADER`: decode then has the request parsed and queued when
prefill's KV arrives, and waits for it as long as prefill's leg lives. It does so only while `GAUGE` on both instances'
/metrics says that their transfer agents are connected with each other and can tell how a leg ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADER = "x-mooncake-v0-handoff"
GAUGE = "mooncake_v0_early_decode"
ID_BYTES = 16

_VALUE = re.compile(r"([0-9a-f]{32});within=(\d{1,5})")


@dataclass(frozen=True)
class Handoff:
    """One request's way through a pair. id: 16 bytes; within_s: decode waits no longer than this, from its arrival on."""

    id: bytes
    within_s: int

    def header(self) -> str:
        return f"{self.id.hex()};within={self.within_s}"


def parse_handoff(value: str) -> Handoff | None:
    """The header's value; None for anything else."""
    found = _VALUE.fullmatch(value)
    return None if found is None else Handoff(bytes.fromhex(found[1]), int(found[2]))
