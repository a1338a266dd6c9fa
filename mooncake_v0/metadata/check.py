"""What is wrong in a store: one function per rule, from segments to findings. `metadata check` calls `check_segments`.

Each rule's docstring says what it is about and how it shows itself in the pinned engine (0.3.3.post2).
"""

from __future__ import annotations

from typing import Callable, Iterator, Mapping, Sequence

from mooncake_v0.errors import ERROR, INFO, WARNING, Diagnostic
from mooncake_v0.metadata.engine_values import RAM_PREFIX, RPC_PREFIX, fault_in
from mooncake_v0.metadata.liveness import ALIVE, STALE, Liveness, is_loopback
from mooncake_v0.metadata.segments import Segment

Rule = Callable[[Segment], Iterator[Diagnostic]]


def check_segments(segments: Sequence[Segment], liveness: Mapping[str, Liveness]) -> list[Diagnostic]:
    """All findings, the dead segments' own first; a dead segment gets no other finding."""
    living = [s for s in segments if liveness[s.name].status != STALE]
    found = [_stale(s, liveness[s.name]) for s in segments if liveness[s.name].status == STALE]
    for segment in living:
        for rule in SEGMENT_RULES:
            found += rule(segment)
    return found + list(_across(living, liveness))


def _stale(segment: Segment, liveness: Liveness) -> Diagnostic:
    return Diagnostic(
        "metadata-stale-segment",
        WARNING,
        segment.name,
        f"its process is gone: {liveness.reason}",
        "remove its keys with `mooncake-v0 metadata prune`",
    )


def corrupt_value(segment: Segment) -> Iterator[Diagnostic]:
    """A value that is not what the engine writes: transfers from that segment fail, some with an exception."""
    for key in segment.corrupt_keys:
        value = next(entry.value for entry in segment.entries if entry.key == key)
        what = f"its value cannot be read: {fault_in(key, value) or 'it is no record of ours'}"
        fix = "restart that instance, which publishes it again, or remove the key"
        yield Diagnostic("metadata-corrupt-value", ERROR, key, what, fix)


def half_published(segment: Segment) -> Iterator[Diagnostic]:
    """One of the engine's two keys is missing: peers cannot connect (first contact returns -1)."""
    keys = {entry.key for entry in segment.entries}
    for prefix, other in ((RAM_PREFIX, RPC_PREFIX), (RPC_PREFIX, RAM_PREFIX)):
        if prefix + segment.name in keys and other + segment.name not in keys:
            yield Diagnostic(
                "metadata-half-published",
                ERROR,
                segment.name,
                f"{prefix}NAME exists but {other}NAME does not",
                "restart that instance; its other key was removed or never written",
            )


def address_differs(segment: Segment) -> Iterator[Diagnostic]:
    """The engine advertises something else than its name says: without MC_LEGACY_RPC_PORT_BINDING=1 it takes the first
    network interface and a random port, and a restarted peer stays unreachable."""
    if segment.rpc_meta is None:
        return
    advertised = f"{segment.host}:{segment.handshake_port}"
    if advertised != segment.name:
        yield Diagnostic(
            "metadata-address-differs",
            WARNING,
            segment.name,
            f"it advertises {advertised}",
            "start it with MC_LEGACY_RPC_PORT_BINDING=1 (mooncake-v0 does), so that the configured address is used",
        )


def loopback_published(segment: Segment) -> Iterator[Diagnostic]:
    """A loopback address is reachable from its own host only."""
    if segment.host is not None and is_loopback(segment.host):
        yield Diagnostic(
            "metadata-loopback-published",
            INFO,
            segment.name,
            f"it advertises {segment.host}, which no other host can reach",
            "put the host's network address into prefill_url and decode_url, if the peers are on several hosts",
        )


def devices_empty(segment: Segment) -> Iterator[Diagnostic]:
    """rdma without a usable device: initialize returned 0, and every transfer will return -1."""
    if segment.protocol == "rdma" and segment.ram is not None and not segment.devices:
        yield Diagnostic(
            "metadata-devices-empty",
            ERROR,
            segment.name,
            "it speaks rdma but published no device",
            "check device_name in mooncake.json on that host: the device must exist and its port be ACTIVE",
        )


def buffers_bad(segment: Segment) -> Iterator[Diagnostic]:
    """A buffer of length 0 or at address 0 makes every new peer refuse the whole segment; no buffer at all means that
    the start has not finished."""
    if segment.ram is None:
        return
    if not segment.buffers:
        yield Diagnostic(
            "metadata-no-buffers", WARNING, segment.name, "it has published no buffer yet", "look again; then its log"
        )
    if any(not buffer.get("addr") or not buffer.get("length") for buffer in segment.buffers):
        yield Diagnostic(
            "metadata-empty-buffer",
            ERROR,
            segment.name,
            "one of its buffers has address or length 0, so that new peers refuse the segment",
            "restart that instance",
        )


SEGMENT_RULES: tuple[Rule, ...] = (
    corrupt_value,
    half_published,
    address_differs,
    loopback_published,
    devices_empty,
    buffers_bad,
)


def _across(living: Sequence[Segment], liveness: Mapping[str, Liveness]) -> Iterator[Diagnostic]:
    yield from _protocols(living)
    yield from _deployments(living)
    yield from _same_place(living, liveness)


def _protocols(living: Sequence[Segment]) -> Iterator[Diagnostic]:
    protocols = sorted({s.protocol for s in living if s.protocol is not None})
    if len(protocols) > 1:
        yield Diagnostic(
            "metadata-mixed-protocols",
            ERROR,
            ", ".join(s.name for s in living if s.protocol == protocols[0])[:200],
            f"segments speak {' and '.join(protocols)}; a tcp and an rdma peer cannot exchange data",
            "give both sides the same protocol in mooncake.json",
        )


def _deployments(living: Sequence[Segment]) -> Iterator[Diagnostic]:
    names = sorted({s.record.deployment for s in living if s.record is not None and s.record.deployment})
    if len(names) > 1:
        yield Diagnostic(
            "metadata-several-deployments",
            INFO,
            "the store",
            f"{len(names)} deployments share it ({', '.join(name[:12] for name in names)}): the engine's keys have no "
            "prefix per deployment, so two with the same address would overwrite each other",
            "give each deployment its own redis database, gateway or etcd; or make sure that no two addresses are equal",
        )


def _same_place(living: Sequence[Segment], liveness: Mapping[str, Liveness]) -> Iterator[Diagnostic]:
    places: dict[tuple[str, str, int], list[str]] = {}
    for segment in living:
        record = segment.record
        if record is not None and liveness[segment.name].status == ALIVE:
            places.setdefault((record.deployment, record.role, record.rank), []).append(segment.name)
    for (_, role, rank), names in places.items():
        if len(names) > 1:
            yield Diagnostic(
                "metadata-rank-twice",
                ERROR,
                ", ".join(names)[:200],
                f"{len(names)} instances say that they are {role} rank {rank}",
                "end the one that is not meant to run",
            )
