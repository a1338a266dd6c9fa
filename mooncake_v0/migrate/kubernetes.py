"""Reads Kubernetes manifests (also rendered Helm charts): workloads, ConfigMaps, Services. Called by `files`.

ConfigMaps become files of their own; a mount of one points to them as `configmap:NAME/KEY`. Values of Secrets are
never kept.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any, Iterator, Mapping

from mooncake_v0.migrate.commands import Nested, Scene, container_command
from mooncake_v0.migrate.document import text_of
from mooncake_v0.migrate.records import Found, Place, Shape, TextFile
from mooncake_v0.migrate.secrets import Secrets

WORKLOADS = frozenset(
    [
        "Deployment",
        "StatefulSet",
        "DaemonSet",
        "ReplicaSet",
        "Job",
        "Pod",
        "ReplicationController",
        "CronJob",
        "LeaderWorkerSet",
    ]
)
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


def is_manifest(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("kind"), str) and "apiVersion" in document


def flatten(documents: list[Any]) -> Iterator[Mapping[str, Any]]:
    """Manifests of a file, with the items of every List."""
    for document in documents:
        if is_manifest(document):
            if document["kind"].endswith("List") and isinstance(document.get("items"), list):
                yield from flatten(document["items"])
            else:
                yield document


def read_manifests(
    documents: list[Any], lines: Mapping[int, int], file: str, found: Found, secrets: Secrets, nested: Nested
) -> None:
    """ConfigMaps and Secrets first, because workloads refer to them in any order."""
    manifests = list(flatten(documents))
    maps: dict[str, Mapping[str, Any]] = {}
    for manifest in manifests:
        place = Place(file, lines.get(id(manifest), 0))
        name = _name(manifest)
        if manifest["kind"] == "ConfigMap":
            maps[name] = _mapping(manifest.get("data"))
            for key, text in maps[name].items():
                found.files.append(TextFile(f"configmap:{name}/{key}", text_of(text), place))
        elif manifest["kind"] == "Secret":
            _keep_out(manifest, secrets)
        elif manifest["kind"] == "Service":
            found.services.append((name, place))
    for manifest in manifests:
        if manifest["kind"] in WORKLOADS:
            _workload(manifest, lines, file, found, maps, nested)


def _keep_out(manifest: Mapping[str, Any], secrets: Secrets) -> None:
    for value in _mapping(manifest.get("data")).values():
        secrets.add_encoded(text_of(value))
    for value in _mapping(manifest.get("stringData")).values():
        secrets.add(text_of(value))


def _mapping(value: Any) -> Mapping[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _name(manifest: Mapping[str, Any]) -> str:
    return text_of(_mapping(manifest.get("metadata")).get("name"))


def pod_specs(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Pod specs anywhere inside a workload (Deployment, CronJob and LeaderWorkerSet nest them differently)."""
    if not isinstance(value, dict) or depth > 8:
        return
    if isinstance(value.get("containers"), list):
        yield value
        return
    for item in value.values():
        yield from pod_specs(item, depth + 1)


def _workload(
    manifest: Mapping[str, Any],
    lines: Mapping[int, int],
    file: str,
    found: Found,
    maps: Mapping[str, Mapping[str, Any]],
    nested: Nested,
) -> None:
    for spec in pod_specs(manifest):
        for container in _items(spec.get("containers")) + _items(spec.get("initContainers")):
            place = Place(file, lines.get(id(container), 0))
            scene = Scene(
                shape=Shape("kubernetes", {"manifest": manifest, "container": text_of(container.get("name"))}),
                name=_name(manifest),
                host=text_of(_mapping(spec.get("nodeSelector")).get("kubernetes.io/hostname") or spec.get("nodeName")),
                image=text_of(container.get("image")),
                mounts=tuple(_mounts(container, spec)),
                service_links=spec.get("enableServiceLinks") is not False,
            )
            environment = _environment(container, place, found, maps)
            known = dict(environment)
            words = [
                [_referenced(text_of(word), known) for word in _list(container.get(key))] for key in ("command", "args")
            ]
            container_command(words[0], words[1], environment, place, found, scene, nested)


def _list(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, str) else []


def _referenced(text: str, environment: Mapping[str, str]) -> str:
    """Kubernetes' own `$(NAME)`; unknown names stay as written."""
    return _REFERENCE.sub(lambda match: environment.get(match[1], match[0]) if match[1] else "$", text)


def _environment(
    container: Mapping[str, Any], place: Place, found: Found, maps: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for source in _items(container.get("envFrom")):
        name = text_of(_mapping(source.get("configMapRef")).get("name"))
        if name in maps:
            pairs += [(key, text_of(value)) for key, value in maps[name].items()]
        elif name:
            found.note(place, f"envFrom configMapRef {name}", "the ConfigMap is not among the given paths")
    for entry in _items(container.get("env")):
        name = text_of(entry.get("name"))
        if "value" in entry:
            pairs.append((name, _referenced(text_of(entry["value"]), dict(pairs))))
            continue
        origin = _mapping(entry.get("valueFrom"))
        reference = _mapping(origin.get("configMapKeyRef"))
        value = maps.get(text_of(reference.get("name")), {}).get(text_of(reference.get("key")))
        pairs.append((name, text_of(value) if value is not None else f"${{{name}}}"))
    return pairs


def _mounts(container: Mapping[str, Any], spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    volumes = {text_of(volume.get("name")): volume for volume in _items(spec.get("volumes"))}
    for mount in _items(container.get("volumeMounts")):
        volume = volumes.get(text_of(mount.get("name")), {})
        config_map = text_of(_mapping(volume.get("configMap")).get("name"))
        host_path = text_of(_mapping(volume.get("hostPath")).get("path"))
        path, sub_path = text_of(mount.get("mountPath")), text_of(mount.get("subPath"))
        if config_map and sub_path:
            yield path, f"configmap:{config_map}/{sub_path}"
        elif config_map:
            yield posixpath.join(path, ""), f"configmap:{config_map}/"
        elif host_path:
            yield path, host_path
