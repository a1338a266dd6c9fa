"""What runs today, out of the invocations: instances joined into pairs, proxies, metadata services.

Called by `report.build` after `files` has read everything. Instances of a pair find each other through the mooncake.json
that they share; the names given here (prefill, decode, prefill-1, ...) do not depend on the format that was read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

from mooncake_v0.migrate.facts import version_key
from mooncake_v0.migrate.instances import Instance, MooncakeFile, mooncake_files, read_instance
from mooncake_v0.migrate.own_launch import launched
from mooncake_v0.migrate.proxies import Proxy, find_proxies
from mooncake_v0.migrate.records import Found, Place
from mooncake_v0.migrate.server_arguments import is_server


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode instance that share a mooncake.json; one side may be missing in what was given."""

    prefill: Instance | None
    decode: Instance | None
    config: MooncakeFile | None

    def instances(self) -> list[Instance]:
        return [instance for instance in (self.prefill, self.decode) if instance is not None]


@dataclass(frozen=True)
class Deployment:
    """Everything of today that the report speaks about."""

    pairs: tuple[Pair, ...]
    plain: tuple[Instance, ...]
    proxies: tuple[Proxy, ...]
    configs: tuple[MooncakeFile, ...]
    metadata_services: tuple[tuple[str, Place], ...]
    versions: tuple[tuple[str, str], ...]
    services: tuple[str, ...]

    def instances(self) -> list[Instance]:
        return [instance for pair in self.pairs for instance in pair.instances()] + list(self.plain)


def assemble(found: Found) -> Deployment:
    """Sort the invocations into instances, proxies and metadata services, and join instances into pairs."""
    configs = mooncake_files(found)
    instances: list[Instance] = []
    metadata: list[tuple[str, Place]] = []
    invocations = [server for item in found.invocations for server in launched(item) or [item]]
    for invocation in invocations:
        if is_server(invocation.argv):
            instances.append(read_instance(invocation, configs, found))
        elif _metadata_kind(invocation.argv):
            metadata.append((_metadata_kind(invocation.argv), invocation.place))
    pairs, plain = _joined(_unique(instances), found)
    return Deployment(
        pairs=tuple(pairs),
        plain=tuple(plain),
        proxies=tuple(find_proxies(found)),
        configs=tuple({config.identity(): config for config in configs.values()}.values()),
        metadata_services=tuple({(kind, place.file): (kind, place) for kind, place in reversed(metadata)}.values())[
            ::-1
        ],
        versions=tuple(sorted({(name, version) for name, version, _ in found.versions})),
        services=tuple(name for name, _ in found.services),
    )


def _metadata_kind(argv: Sequence[str]) -> str:
    head = argv[0].rpartition("/")[2]
    text = " ".join(argv[:4])
    if head in ("etcd", "redis-server", "mooncake_master"):
        return {"redis-server": "redis"}.get(head, head)
    if "http_metadata_server" in text:
        return "http"
    return "mooncake-v0 metadata" if head == "mooncake-v0" and argv[1:2] == ("metadata",) else ""


def _unique(instances: Sequence[Instance]) -> list[Instance]:
    """The same command in two files (a script and the runbook that quotes it) is one instance."""
    seen: dict[tuple[object, ...], Instance] = {}
    for item in instances:
        key = (item.arguments, item.role, item.host, item.port, item.variable("CUDA_VISIBLE_DEVICES"))
        seen.setdefault(key, item)
    return list(seen.values())


def _joined(instances: Sequence[Instance], found: Found) -> tuple[list[Pair], list[Instance]]:
    groups: dict[str, list[Instance]] = {}
    for item in instances:
        if item.role != "plain":
            # without a mooncake.json, the same model is the best sign of a pair
            key = item.config.identity() if item.config else f"model {item.model}"
            groups.setdefault(key, []).append(item)
    pairs: list[Pair] = []
    for members in groups.values():
        prefills = [item for item in members if item.role in ("prefill", "both")]
        decodes = [item for item in members if item.role == "decode"]
        for index in range(max(len(prefills), len(decodes))):
            prefill = prefills[index] if index < len(prefills) else None
            decode = decodes[index] if index < len(decodes) else None
            pairs.append(Pair(prefill, decode, members[0].config))
    pairs.sort(key=_pair_order)
    named = [_named(pair, f"-{number}" if len(pairs) > 1 else "") for number, pair in enumerate(pairs, 1)]
    plain = [item for item in instances if item.role == "plain"]
    plain.sort(key=lambda item: (item.host, item.port, item.model))
    return named, [replace(item, name=f"instance-{number}") for number, item in enumerate(plain, 1)]


def _pair_order(pair: Pair) -> tuple[object, ...]:
    first = pair.instances()[0]
    return version_key(first.host), first.host, version_key(first.port), first.model


def _named(pair: Pair, suffix: str) -> Pair:
    prefill = replace(pair.prefill, name=f"prefill{suffix}") if pair.prefill else None
    decode = replace(pair.decode, name=f"decode{suffix}") if pair.decode else None
    return Pair(prefill, decode, pair.config)
