"""V1 launch files for docker run, compose and Kubernetes. Called by `emit`."""

from __future__ import annotations

import copy
from typing import Any, Iterator, Mapping, Sequence

import yaml

from mooncake_v0.migrate.convert import V1Instance
from mooncake_v0.migrate.docker import DockerRun
from mooncake_v0.migrate.document import text_of
from mooncake_v0.migrate.emit_text import REFERENCE, exports, header, script_command
from mooncake_v0.migrate.kubernetes import pod_specs
from mooncake_v0.migrate.proxy_plan import ProxyPlan
from mooncake_v0.migrate.rollout import prerequisites
from mooncake_v0.migrate.secrets import is_secret_name

_DROPPED_SERVICE_KEYS = ("command", "entrypoint", "environment", "env_file", "depends_on", "build", "container_name")


def image(target: str) -> str:
    """The image that Dockerfile.v1 builds."""
    return f"vllm-mooncake:{target}"


def dockerfile(target: str) -> str:
    engine = next(row.title for row in prerequisites(target) if row.name == "engine")
    return (
        f"# docker build -f Dockerfile.v1 -t {image(target)} .\n"
        f"FROM vllm/vllm-openai:v{target}\n"
        "# the engine is no dependency of vLLM; both packages install the module mooncake, so only one may stay\n"
        f"RUN pip uninstall -y mooncake-transfer-engine; {engine}\n"
    )


def docker_script(item: V1Instance, target: str) -> str:
    """A script with docker run; variables are exported first and handed on by name, so that no value is on the line."""
    run = item.original.invocation.shape.document
    assert isinstance(run, DockerRun)
    words = [run.program, "run"]
    for name, value in run.options:
        words += [name, value] if value else [name]
    words += ["--name", f"{item.name}-v1"]
    words += [word for name, _ in item.env for word in ("-e", name)]
    words += [word for host, inner in run.ports for word in ("-p", f"{host}:{inner}" if host else inner)]
    words += [word for volume in run.volumes if not _is_config(item, volume) for word in ("-v", volume)]
    words += ["--entrypoint", "vllm", image(target), *item.argv[1:]]
    lines = ["#!/usr/bin/env bash", *header(item, target), "set -euo pipefail", *exports(item.env)]
    return "\n".join([*lines, "exec " + script_command(words), ""])


def _is_config(item: V1Instance, volume: str) -> bool:
    """Whether a volume only brings mooncake.json, which V1 does not read."""
    path = item.original.variable("MOONCAKE_CONFIG_PATH") or ""
    parts = volume.split(":")
    return len(parts) > 1 and path == parts[1]


def compose_file(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> str:
    """One compose file with a service per instance and the proxy."""
    lines: list[str] = []
    services: dict[str, Any] = {}
    top: dict[str, Any] = {}
    for item in items:
        document = item.original.invocation.shape.document
        lines += header(item, target)
        services[item.name] = _service(item, document["service"], target)
        top.update(document["top"])
    if proxy is not None:
        lines.append(f"# proxy: put {proxy.file} beside this file, from {proxy.origin}")
        for name, argv in _named_proxies(proxy):
            services[name] = _proxy_service(argv, target)
    text = yaml.safe_dump({"services": services, **top}, sort_keys=False, allow_unicode=True, width=1000)
    return "\n".join([*lines, text])


def _service(item: V1Instance, original: Mapping[str, Any], target: str) -> dict[str, Any]:
    kept = {key: copy.deepcopy(value) for key, value in original.items() if key not in _DROPPED_SERVICE_KEYS}
    if isinstance(kept.get("volumes"), list):
        kept["volumes"] = [volume for volume in kept["volumes"] if not _is_config(item, _volume_text(volume))]
        if not kept["volumes"]:
            del kept["volumes"]
    new = {
        "image": image(target),
        "entrypoint": ["vllm"],
        "command": [_compose_word(word) for word in item.argv[1:]],
        "environment": {name: _compose_value(value) for name, value in item.env},
    }
    return {**kept, **new}


def _volume_text(volume: Any) -> str:
    if isinstance(volume, dict):
        return f"{volume.get('source', '')}:{volume.get('target', '')}"
    return str(volume)


def _compose_word(word: str) -> str:
    """Compose replaces variables: every $ of a value is doubled, `${NAME}` alone stays."""
    return word if REFERENCE.fullmatch(word) else word.replace("$", "$$")


def _compose_value(value: str) -> str:
    match = REFERENCE.fullmatch(value)
    return f"${{{match[1]}:?set {match[1]} in .env}}" if match else value.replace("$", "$$")


def _named_proxies(proxy: ProxyPlan) -> list[tuple[str, tuple[str, ...]]]:
    one = len(proxy.argvs) == 1
    return [("proxy" if one else f"proxy-{number}", argv) for number, argv in enumerate(proxy.argvs, 1)]


def _proxy_service(argv: Sequence[str], target: str) -> dict[str, Any]:
    return {
        "image": image(target),
        "network_mode": "host",
        "entrypoint": ["python3"],
        "command": [f"/proxy/{argv[1]}", *map(_compose_word, argv[2:])],
        "volumes": [f"./{argv[1]}:/proxy/{argv[1]}:ro"],
    }


def manifest_files(items: Sequence[V1Instance], target: str, proxy: ProxyPlan | None) -> dict[str, str]:
    """A manifest per original workload, and one for the proxy."""
    files: dict[str, str] = {}
    groups: dict[int, list[V1Instance]] = {}
    for item in items:
        groups.setdefault(id(item.original.invocation.shape.document["manifest"]), []).append(item)
    for members in groups.values():
        lines = [line for item in members for line in header(item, target)]
        text = yaml.safe_dump(_manifest(members, target), sort_keys=False, allow_unicode=True, width=1000)
        files["-".join(item.name for item in members) + ".yaml"] = "\n".join([*lines, text])
    if proxy is not None:
        lines = [
            f"# proxy; its file comes from {proxy.origin}:",
            f"# kubectl create configmap mooncake-proxy --from-file={proxy.file}",
        ]
        for name, argv in _named_proxies(proxy):
            text = yaml.safe_dump(_proxy_manifest(f"mooncake-{name}-v1", argv, target), sort_keys=False, width=1000)
            files[f"{name}.yaml"] = "\n".join([*lines, text])
    return files


def _manifest(items: Sequence[V1Instance], target: str) -> dict[str, Any]:
    manifest: dict[str, Any] = copy.deepcopy(dict(items[0].original.invocation.shape.document["manifest"]))
    manifest.pop("status", None)
    metadata = manifest.setdefault("metadata", {})
    if isinstance(metadata, dict):
        metadata["name"] = f"{metadata.get('name', items[0].name)}-v1"
        for key in ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink"):
            metadata.pop(key, None)
    _rename_labels(manifest)
    for spec in pod_specs(manifest):
        for item in items:
            _container(spec, item, target)
    return manifest


def _rename_labels(manifest: dict[str, Any]) -> None:
    """Give selector labels other values, or a V0 Service would send requests to V1 pods."""
    spec = manifest.get("spec")
    selector = spec.get("selector") if isinstance(spec, dict) else None
    labels = selector.get("matchLabels") if isinstance(selector, dict) else None
    if not isinstance(spec, dict) or not isinstance(labels, dict):
        return
    template = spec.get("template")
    inner = template.get("metadata") if isinstance(template, dict) else None
    pod_labels = inner.get("labels") if isinstance(inner, dict) else None
    for key in list(labels):
        new = f"{labels[key]}-v1"
        labels[key] = new
        if isinstance(pod_labels, dict) and key in pod_labels:
            pod_labels[key] = new


def _container(spec: Mapping[str, Any], item: V1Instance, target: str) -> None:
    name = item.original.invocation.shape.document["container"]
    for container in spec["containers"]:
        if isinstance(container, dict) and text_of(container.get("name")) == name:
            config = item.original.variable("MOONCAKE_CONFIG_PATH") or ""
            container["image"] = image(target)
            container["command"] = ["vllm", "serve"]
            container["args"] = [_kubernetes_word(word) for word in item.argv[2:]]
            container["env"] = list(_kubernetes_env(item, container.get("env")))
            container.pop("envFrom", None)
            _drop_config_mount(spec, container, config)


def _kubernetes_word(word: str) -> str:
    """Kubernetes replaces $(NAME): a literal one is written $$(NAME); `${NAME}` alone becomes its own notation."""
    match = REFERENCE.fullmatch(word)
    return f"$({match[1]})" if match else word.replace("$(", "$$(")


def _kubernetes_env(item: V1Instance, original: Any) -> Iterator[dict[str, Any]]:
    entries = original if isinstance(original, list) else []
    referenced = {
        str(entry.get("name")): entry for entry in entries if isinstance(entry, dict) and "valueFrom" in entry
    }
    if item.role != "plain":
        yield {"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    for name, value in item.env:
        if name == "VLLM_HOST_IP" and item.role != "plain":
            continue
        if name in referenced and (REFERENCE.fullmatch(value) or is_secret_name(name)):
            yield referenced[name]
        elif REFERENCE.fullmatch(value):
            yield {"name": name, "valueFrom": {"secretKeyRef": {"name": "vllm-secrets", "key": name}}}
        else:
            yield {"name": name, "value": _kubernetes_word(value)}


def _drop_config_mount(spec: Mapping[str, Any], container: dict[str, Any], config: str) -> None:
    mounts = container.get("volumeMounts")
    if not config or not isinstance(mounts, list):
        return
    gone = [mount for mount in mounts if isinstance(mount, dict) and _covers(str(mount.get("mountPath", "")), config)]
    container["volumeMounts"] = [mount for mount in mounts if mount not in gone]
    names = {mount.get("name") for mount in gone} - {
        m.get("name") for m in container["volumeMounts"] if isinstance(m, dict)
    }
    if not container["volumeMounts"]:
        del container["volumeMounts"]
    volumes = spec.get("volumes")
    if isinstance(volumes, list):
        volumes[:] = [volume for volume in volumes if not (isinstance(volume, dict) and volume.get("name") in names)]


def _covers(mount: str, path: str) -> bool:
    return bool(mount) and (path == mount or path.rpartition("/")[0] == mount.rstrip("/"))


def _proxy_manifest(name: str, argv: Sequence[str], target: str) -> dict[str, Any]:
    labels = {"app": name}
    container = {
        "name": "proxy",
        "image": image(target),
        "command": ["python3", f"/proxy/{argv[1]}"],
        "args": [_kubernetes_word(word) for word in argv[2:]],
        "ports": [{"containerPort": int(argv[argv.index("--port") + 1])}],
        "volumeMounts": [{"name": "proxy", "mountPath": "/proxy"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "proxy", "configMap": {"name": "mooncake-proxy"}}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }
