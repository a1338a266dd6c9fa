"""What blocks the move, what must be changed by hand and what changes by itself: the tables held against a deployment.

A deployment is described by tags ("flag:--enable-lora", "arch:...", "topology:tp-differs"); a row applies if its version
range covers the target and its condition holds. Called by `report`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Mapping, Sequence

from mooncake_v0.migrate.deployment import Deployment, Pair
from mooncake_v0.migrate.facts import Fact, applies, by_name, compute_capability, holds, table, version_key
from mooncake_v0.migrate.instances import Instance

SEVERITIES = ("blocker", "change", "silent", "info")
_MULTIMODAL = frozenset(
    [
        "Qwen2VLForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "InternVLChatModel",
        "LlavaForConditionalGeneration",
        "PixtralForConditionalGeneration",
        "MiniCPMV",
        "Phi3VForCausalLM",
        "FuyuForCausalLM",
        "ChameleonForConditionalGeneration",
        "MllamaForConditionalGeneration",
    ]
)
_ENCODER_DECODER = frozenset(
    ["BartModel", "BartForConditionalGeneration", "Florence2ForConditionalGeneration", "MllamaForConditionalGeneration"]
)


@dataclass(frozen=True)
class Finding:
    """One row that applies; instances are the names of those it applies to, empty for the deployment as a whole."""

    rule: str
    severity: str
    title: str
    text: str
    fix: str
    source: str
    instances: tuple[str, ...]


@dataclass(frozen=True)
class Advisory:
    """One published fault of what runs today."""

    id: str
    severity: str
    title: str
    text: str
    fixed: str
    fixed_by_target: bool
    source: str


def check(deployment: Deployment, target: str, hardware: Mapping[str, str]) -> list[Finding]:
    """Findings, worst first; within a severity in the order of the tables."""
    whole = _deployment_tags(deployment, hardware)
    tags = {item.name: _instance_tags(item) | whole for item in deployment.instances()}
    for pair in deployment.pairs:
        for item in pair.instances():
            tags[item.name] |= _pair_tags(pair)
    findings: list[Finding] = []
    for row in [*table("blockers"), *_ahead(table("behaviours"), deployment)]:
        names = tuple(name for name, own in tags.items() if applies(row, target) and holds(row.when, own))
        if names:
            findings.append(_finding(row, names if len(names) < len(tags) else ()))
    findings += _flag_findings(deployment, target)
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _ahead(rows: Sequence[Fact], deployment: Deployment) -> list[Fact]:
    """Behaviour that is still ahead: not what the version that runs today already does."""
    running = [version_key(version) for name, version in deployment.versions if name == "vllm"]
    return [
        row for row in rows if not (row.since and running and min(running) >= version_key(row.since.split("-")[-1]))
    ]


def _finding(row: Fact, names: tuple[str, ...]) -> Finding:
    return Finding(row.name, row.severity, row.title, row.text, row.fix, row.source, names)


def _flag_findings(deployment: Deployment, target: str) -> list[Finding]:
    """Flags and variables whose own row is a blocker and that no rule of the blockers table speaks about."""
    covered = {term for row in table("blockers") for term in row.when.split()}
    findings: dict[str, Finding] = {}
    for item in deployment.instances():
        names = [("flag:" + flag.name, by_name("flags").get(flag.name)) for flag in item.arguments.flags]
        names += [("env:" + name, by_name("envs").get(name)) for name, _ in item.env]
        for tag, row in names:
            if row is not None and row.severity == "blocker" and applies(row, target) and tag not in covered:
                old = findings.get(row.name)
                users = (*(old.instances if old else ()), item.name)
                text = row.text or "the feature was removed"
                findings[row.name] = Finding(row.name, "blocker", f"{row.name} is gone", text, "", row.source, users)
    return list(findings.values())


def _instance_tags(item: Instance) -> set[str]:
    arguments = item.arguments
    tags = {f"flag:{flag.name}" for flag in arguments.flags} | {f"env:{name}" for name, _ in item.env}
    tags |= {f"role:{item.role}", f"arch:{item.architecture}", f"quant:{item.quantization}"}
    tags |= {f"quant:{arguments.value('--load-format')}"} if arguments.has("--load-format") else set()
    tags |= (
        {f"attention:{item.variable('VLLM_ATTENTION_BACKEND')}"} if item.variable("VLLM_ATTENTION_BACKEND") else set()
    )
    tags |= {f"protocol:{item.config.protocol}"} if item.config else set()
    tags |= {tag for tag, holds_for in _FEATURES.items() if holds_for(item)}
    accelerators = {"HABANA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES"}
    if arguments.value("--device") in ("neuron", "openvino", "hpu", "tpu", "xpu") or accelerators & set(dict(item.env)):
        tags.add("device:plugin")
    return tags


def _speculative_draft(item: Instance) -> str:
    return item.arguments.value("--speculative-model").lower()


_FEATURES: dict[str, Callable[[Instance], bool]] = {
    "feature:multimodal": lambda item: item.architecture in _MULTIMODAL or item.arguments.has("--limit-mm-per-prompt"),
    "feature:encoder_decoder": lambda item: item.architecture in _ENCODER_DECODER,
    "feature:api_key": lambda item: item.arguments.has("--api-key") or item.variable("VLLM_API_KEY") is not None,
    "feature:prompt_adapter": lambda item: item.arguments.has("--enable-prompt-adapter", "--prompt-adapters"),
    "feature:pooling": lambda item: (
        item.arguments.value("--task") not in ("", "auto", "generate") and item.role != "plain"
    ),
    "feature:medusa": lambda item: any(
        word in _speculative_draft(item) for word in ("medusa", "accelerator", "mlp-spec")
    ),
    "feature:store": lambda item: item.connector == "MooncakeStoreConnector",
    "feature:other_connector": lambda item: (
        item.role != "plain" and item.connector not in ("MooncakeConnector", "MooncakeStoreConnector")
    ),
    "feature:kv_both": lambda item: item.role == "both",
    "feature:guided": lambda item: item.arguments.has("--guided-decoding-backend"),
    "feature:device_name": lambda item: bool(item.config and item.config.text("device_name")),
    "feature:expandable_segments": lambda item: (
        "expandable_segments:true" in (item.variable("PYTORCH_CUDA_ALLOC_CONF") or "").lower()
        and item.role != "plain"
        and not item.arguments.has("--enable-cumem-allocator")
    ),
    "topology:pp": lambda item: item.pipeline_parallel_size > 1 and item.role != "plain",
    "topology:multi-node": lambda item: (
        "ray" in item.arguments.value("--distributed-executor-backend")
        or item.arguments.has("--worker-use-ray")
        or item.tensor_parallel_size * item.pipeline_parallel_size > 8
    ),
}


def _deployment_tags(deployment: Deployment, hardware: Mapping[str, str]) -> set[str]:
    tags: set[str] = set()
    capability = compute_capability(hardware["gpu"]) if "gpu" in hardware else None
    tags |= {f"gpu-cc:{capability}"} if capability else set()
    tags |= {f"{key}:{hardware[key]}" for key in ("driver", "cuda", "python") if key in hardware}
    if _ported_pipe(deployment):
        tags.add("feature:ported_pipe")
    if "vllm" in deployment.services and any(item.invocation.service_links for item in deployment.instances()):
        tags.add("feature:service_named_vllm")
    return tags


def _ported_pipe(deployment: Deployment) -> bool:
    """A release with the vulnerable pipe, or a pair whose pipe may be a port of it: nothing says that it is ours."""
    versions = [version for name, version in deployment.versions if name == "vllm"]
    ours = any(name == "mooncake-v0" for name, _ in deployment.versions) or any(
        item.launched_by_us for item in deployment.instances()
    )
    if deployment.pairs and not ours and (not versions or "0.6.4.post1" in versions):
        return True
    return any(version_key("0.6.5") <= version_key(version) < version_key("0.8.5") for version in versions)


def _pair_tags(pair: Pair) -> set[str]:
    if pair.prefill is None or pair.decode is None:
        return set()
    one, other = pair.prefill, pair.decode
    tags: set[str] = set()
    sizes = sorted((one.tensor_parallel_size, other.tensor_parallel_size))
    if sizes[0] != sizes[1]:
        tags.add("topology:tp-differs")
    if sizes[1] % sizes[0]:
        tags.add("topology:tp-not-divisible")
    for flag, tag, default in (("--block-size", "block-size", "16"), ("--kv-cache-dtype", "kv-dtype", "auto")):
        if (one.arguments.value(flag) or default) != (other.arguments.value(flag) or default):
            tags.add(f"topology:{tag}-differs")
    if one.model and other.model and one.model != other.model:
        tags.add("topology:model-differs")
    return tags


def advisories(deployment: Deployment, target: str) -> list[Advisory]:
    """Published faults of the version that runs, with the release that fixes each."""
    tags: set[str] = _deployment_tags(deployment, {})
    for item in deployment.instances():
        tags |= _instance_tags(item)
    rows: Iterable[Fact] = (row for row in table("advisories") if holds(row.when, tags))
    return [
        Advisory(
            id=row.name,
            severity=row.severity,
            title=row.title,
            text=row.text,
            fixed=row.fixed,
            fixed_by_target=bool(row.fixed) and version_key(row.fixed) <= version_key(target),
            source=row.source,
        )
        for row in rows
        if _runs_affected(row, deployment.versions)
    ]


def _runs_affected(row: Fact, versions: Sequence[tuple[str, str]]) -> bool:
    """Without a known version the pin is assumed, which every row of the table was checked against."""
    running = [version for name, version in versions if name == "vllm"]
    return not running or not row.fixed or any(version_key(version) < version_key(row.fixed) for version in running)
