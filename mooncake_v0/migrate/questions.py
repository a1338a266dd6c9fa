"""What the report cannot know and the operator must answer. Called by `report`."""

from __future__ import annotations

import re
from typing import Mapping, Sequence

from mooncake_v0.migrate.convert import STORE, V1Instance
from mooncake_v0.migrate.deployment import Deployment
from mooncake_v0.migrate.instances import Instance

_ADDRESS = re.compile(r"[\d.]+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")


def questions(
    deployment: Deployment, instances: Sequence[V1Instance], hardware: Mapping[str, str], unresolved: Sequence[str]
) -> list[str]:
    """Open questions, in the order in which they matter."""
    if not instances:
        return ["where are the commands that start vLLM? give their files"]
    return [
        *_hardware(hardware),
        *_pairs(deployment, instances),
        *_models(instances),
        *[f"what is {name}? its value is known only where the command runs" for name in unresolved],
        *_rest(deployment, instances),
    ]


def _hardware(hardware: Mapping[str, str]) -> list[str]:
    asked = {
        "gpu": "which GPUs? below compute capability 7.5 (V100) V1 does not run; give --hardware gpu=NAME",
        "driver": "which NVIDIA driver? give --hardware driver=VERSION (nvidia-smi prints it)",
        "python": "which Python will V1 run on? give --hardware python=3.12",
    }
    return [text for name, text in asked.items() if name not in hardware]


def _pairs(deployment: Deployment, instances: Sequence[V1Instance]) -> list[str]:
    asked = []
    for pair in deployment.pairs:
        for side, other in ((pair.prefill, "decode"), (pair.decode, "prefill")):
            partner = pair.decode if other == "decode" else pair.prefill
            if side is not None and partner is None:
                asked.append(f"where is the {other} instance of {side.name}? it was not among the given files")
        store = any(item.connector == STORE for item in pair.instances())
        if pair.config is None and not store and not any(_says_protocol(item) for item in pair.instances()):
            names = " and ".join(item.name for item in pair.instances())
            asked.append(
                f"what does the mooncake.json of {names} say? protocol rdma is assumed; V0's own default is tcp"
            )
    for item in instances:
        host = item.original.host
        if (
            item.role != "plain"
            and host
            and not _ADDRESS.fullmatch(host)
            and item.original.variable("VLLM_HOST_IP") is None
        ):
            asked.append(f"which address has {host}? set VLLM_HOST_IP of {item.name} to the one on the data network")
        elif item.role != "plain" and not host:
            asked.append(f"on which host does {item.name} run? set its VLLM_HOST_IP")
    return asked


def _says_protocol(item: Instance) -> bool:
    """Whether the KV config itself names the protocol, as V1's does."""
    extra = (item.kv or {}).get("kv_connector_extra_config")
    return isinstance(extra, dict) and "mooncake_protocol" in extra


def _models(instances: Sequence[V1Instance]) -> list[str]:
    asked = []
    for model in dict.fromkeys(item.original.model for item in instances):
        item = next(item for item in instances if item.original.model == model)
        if not model:
            asked.append("which model? no command names one")
        elif not item.original.architecture:
            asked.append(f"which architecture is {model}? its name does not say; give the folder with its config.json")
        elif item.original.architecture_guessed:
            asked.append(f"is {model} a {item.original.architecture}? that is a guess; its config.json says")
    return asked


def _rest(deployment: Deployment, instances: Sequence[V1Instance]) -> list[str]:
    asked = []
    for item in instances:
        asked += [
            f"what does {flag} of {item.name} do? no release knows it; it was left out" for flag in item.not_carried
        ]
    if any(item.original.arguments.has("--enable-lora") for item in instances):
        asked.append("do the LoRA adapters add tokens or biases? V1 refuses both")
    if any(item.role != "plain" for item in instances):
        asked.append("do clients send guided_* fields, best_of or per-request logits processors?")
        if not deployment.proxies:
            asked.append("which proxy is in front? none was among the given files")
        if not deployment.versions:
            asked.append(
                "where does KV transfer come from? stock 0.6.4.post1 has none: mooncake-v0, or a source build of later main"
            )
    return list(dict.fromkeys(asked))
