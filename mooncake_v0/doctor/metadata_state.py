"""Checks of what is in the metadata store. Whether it answers at all is validate's `online-metadata-unreachable`."""

from __future__ import annotations

import time
from typing import Iterator

from mooncake_v0.doctor.host import Host
from mooncake_v0.doctor.report import OK, SKIPPED, WARNING, Outcome, check
from mooncake_v0.metadata.check import check_segments
from mooncake_v0.metadata.liveness import judge_segments
from mooncake_v0.metadata.prune import read_segments
from mooncake_v0.metadata.segments import Segment
from mooncake_v0.metadata.store import open_store

FUTURE_S = 10.0


@check("error")
def metadata_keys(host: Host) -> Iterator[Outcome]:
    """The store holds keys of instances that are gone, that are half written, or that contradict each other.

    Nothing in the engine expires: a killed instance leaves its keys, and new peers try to reach it.
    """
    segments = _segments(host)
    if segments is None:
        yield Outcome(SKIPPED, "no mooncake.json")
        return
    found = check_segments(segments, judge_segments(segments))
    for item in found:
        stale = item.rule == "metadata-stale-segment"
        command = f"mooncake-v0 metadata prune {host.config_path}" if stale else f"mooncake-v0 explain {item.rule}"
        yield Outcome(item.severity, f"{item.where}: {item.what} [{item.rule}]", "", item.fix, command)
    if not found:
        yield Outcome(OK, f"{len(segments)} segments in the store, nothing wrong with them")


@check(WARNING)
def metadata_clock(host: Host) -> Iterator[Outcome]:
    """An instance's record in the store was written in this host's future: its host's clock is ahead of this one's."""
    segments = _segments(host)
    if segments is None:
        yield Outcome(SKIPPED, "no mooncake.json")
        return
    now_s = time.time()
    ahead = [(s.record.hostname, s.record.refreshed_at - now_s) for s in segments if s.record is not None]
    ahead = [(name, seconds) for name, seconds in ahead if seconds > FUTURE_S]
    for name, seconds in ahead:
        what = f"the clock of {name} is {seconds:.0f} s ahead of this host's"
        yield Outcome(WARNING, what, "", "synchronise both clocks", "timedatectl set-ntp true")
    if not ahead:
        yield Outcome(OK, "no record in the store is from the future")


def _segments(host: Host) -> list[Segment] | None:
    if host.config is None:
        return None
    store = open_store(host.config.metadata_server, timeout_s=host.timeout_s)
    try:
        return read_segments(store)
    finally:
        store.close()
