"""Removing the keys of dead segments: only what is provably dead, and only as it was read.

A segment is removed when two looks, PAUSE_S apart, both find it stale and its values unchanged. The delete itself
compares, so a process that comes back in between keeps its keys. Keys of other applications are never listed nor touched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mooncake_v0.metadata.liveness import STALE, Judge, Liveness, judge_segments
from mooncake_v0.metadata.segments import OUR_PREFIXES, Segment, group_segments
from mooncake_v0.metadata.store import MetadataStore

PAUSE_S = 1.0


@dataclass(frozen=True)
class Candidate:
    """A dead segment and why it is thought dead."""

    segment: Segment
    liveness: Liveness


def read_segments(store: MetadataStore) -> list[Segment]:
    """All segments in the store."""
    return group_segments(entry for prefix in OUR_PREFIXES for entry in store.list(prefix))


def find_candidates(store: MetadataStore, judge: Judge, *, pause_s: float = PAUSE_S) -> list[Candidate]:
    """Segments that two looks found dead."""
    first = _stale(store, judge)
    if not first:
        return []
    time.sleep(pause_s)
    second = _stale(store, judge)
    return [found for name, found in second.items() if name in first and first[name].segment == found.segment]


def remove(store: MetadataStore, candidate: Candidate) -> list[str]:
    """Delete the segment's keys as they were read; returns the keys that were removed."""
    return [entry.key for entry in candidate.segment.entries if store.delete(entry.key, expected=entry.value)]


def _stale(store: MetadataStore, judge: Judge) -> dict[str, Candidate]:
    segments = read_segments(store)
    verdicts = judge_segments(segments, judge)
    return {s.name: Candidate(s, verdicts[s.name]) for s in segments if verdicts[s.name].status == STALE}
