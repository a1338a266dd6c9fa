"""An agent's hold on its engine's keys: is the name free, are the keys still there, and away with them at the end.

The engine neither checks for a rival nor notices when its keys vanish, and removes them on a clean exit only (0.3.3.post2:
a metadata server that restarts empty stays empty). So a transfer agent calls, in this order:

    live_holder       before the engine initialises: refuse the name while another process answers under it
    engine_entries    after each register or unregister: what the engine has published
    restore_missing   every few seconds: write back what has vanished
    withdraw          on every orderly exit, SIGTERM too, after the engine object is gone
"""

from __future__ import annotations

from typing import Sequence

from mooncake_v0.metadata.engine_values import RAM_PREFIX, RPC_PREFIX
from mooncake_v0.metadata.liveness import ALIVE, Judge, Liveness, judge_segments
from mooncake_v0.metadata.registry import INSTANCE_PREFIX
from mooncake_v0.metadata.segments import group_segments
from mooncake_v0.metadata.store import Entry, MetadataStore


def live_holder(store: MetadataStore, name: str) -> Liveness | None:
    """The living process that holds a segment name, with the reason in words; None when the name is free.

    The name is the caller's own address, so a loopback address in it means this host. Keys of a dead process do not
    count: the engine overwrites them.
    """
    entries = _entries(store, name, (RAM_PREFIX, RPC_PREFIX, INSTANCE_PREFIX))
    segments = group_segments(entries)
    if not segments:
        return None
    verdict = judge_segments(segments, Judge(is_local=True))[name]
    return verdict if verdict.status == ALIVE else None


def engine_entries(store: MetadataStore, name: str) -> list[Entry]:
    """What the engine has published for a segment: one or two entries, none when it has not (yet)."""
    return _entries(store, name, (RAM_PREFIX, RPC_PREFIX))


def restore_missing(store: MetadataStore, entries: Sequence[Entry], *, ttl_s: float | None = None) -> list[str]:
    """Write back those entries whose key has vanished; returns their keys. A key with another value is left alone."""
    missing = [entry for entry in entries if store.get(entry.key) is None]
    for entry in missing:
        store.put(entry.key, entry.value, ttl_s=ttl_s)
    return [entry.key for entry in missing]


def withdraw(store: MetadataStore, entries: Sequence[Entry]) -> list[str]:
    """Remove own engine keys that still hold the values given; returns the removed keys. A successor's keys stay."""
    return [entry.key for entry in entries if store.delete(entry.key, expected=entry.value)]


def _entries(store: MetadataStore, name: str, prefixes: Sequence[str]) -> list[Entry]:
    found = [(prefix + name, store.get(prefix + name)) for prefix in prefixes]
    return [Entry(key, value) for key, value in found if value is not None]
