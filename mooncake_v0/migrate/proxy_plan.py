"""The proxy that V1 needs, and why the one of today fails without a sign. Called by `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from mooncake_v0.migrate.convert import V1Instance, quote
from mooncake_v0.migrate.deployment import Deployment
from mooncake_v0.migrate.facts import has

EXAMPLE_PATH = "examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py"
OLD_EXAMPLE_PATH = "examples/online_serving/disaggregated_serving/mooncake_connector/mooncake_connector_proxy.py"
TOY_PATH = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
WHY = {
    "documented": "it sends no kv_transfer_params: every request still answers, but decode computes the whole prompt again",
    "toy": "it sends no transfer_id: requests still answer, but no KV moves; the only sign is Missing transfer_id on prefill",
    "unknown": "it is not known here; without kv_transfer_params and transfer_id decode computes every prompt again",
    "mooncake-v0": "it speaks to V0 instances only: the V0 protocol needs no kv_transfer_params, the V1 protocol does",
    "v1": "it already speaks the V1 protocol; take the file of the target version",
}


@dataclass(frozen=True)
class ProxyPlan:
    """today: one line per proxy found; argv: the command for V1; origin: where its file comes from."""

    today: tuple[str, ...]
    argv: tuple[str, ...]
    origin: str
    notes: tuple[str, ...]
    port: str

    def command(self) -> str:
        return " ".join(map(quote, self.argv))


def plan_proxy(deployment: Deployment, instances: Sequence[V1Instance], target: str) -> ProxyPlan | None:
    """The command for all pairs; None if no instance transfers KV."""
    prefills = [item for item in instances if item.bootstrap_port is not None]
    decodes = [item for item in instances if item.role == "decode"]
    if not prefills and not decodes:
        return None
    port = next((proxy.port for proxy in deployment.proxies if proxy.port), "8000")
    today = tuple(f"{proxy.kind} proxy: {WHY[proxy.kind]}" for proxy in deployment.proxies)
    if has("bootstrap_server", target):
        argv, origin, notes = _example(prefills, decodes, port, target)
    else:
        argv, origin, notes = _toy(prefills, decodes, port, target)
    return ProxyPlan(tuple(dict.fromkeys(today)), tuple(argv), origin, tuple(notes), port)


def url(item: V1Instance) -> str:
    host = item.original.arguments.value("--host")
    host = (
        host
        if host not in ("", "0.0.0.0", "::", "*") and not item.original.host
        else item.original.host or item.name.upper()
    )
    return f"http://[{host}]:{item.original.port}" if ":" in host else f"http://{host}:{item.original.port}"


def _example(
    prefills: Sequence[V1Instance], decodes: Sequence[V1Instance], port: str, target: str
) -> tuple[list[str], str, list[str]]:
    argv = ["python3", "mooncake_connector_proxy.py", "--host", "0.0.0.0", "--port", port]
    for item in prefills:
        argv += ["--prefill", url(item), str(item.bootstrap_port)]
    for item in decodes:
        argv += ["--decode", url(item)]
    path = EXAMPLE_PATH if has("example_moved", target) else OLD_EXAMPLE_PATH
    notes = [
        "it is an example, not part of the wheel: copy it from the tag of the version that runs",
        "it asks the bootstrap servers once, at its start: restart it after every restart of a prefill instance",
        "it listens on 127.0.0.1 unless told otherwise, and serves /v1/completions and /v1/chat/completions only",
        "it replaces the client's Authorization header by its own OPENAI_API_KEY",
        "vLLM's router (vllm-project/router, --kv-connector mooncake) is an alternative",
    ]
    return argv, f"vllm-project/vllm, tag v{target}, {path}", notes


def _toy(
    prefills: Sequence[V1Instance], decodes: Sequence[V1Instance], port: str, target: str
) -> tuple[list[str], str, list[str]]:
    argv = ["python3", "toy_proxy_server.py", "--port", port]
    for option, items in (("--prefiller", prefills), ("--decoder", decodes)):
        for item in items[:1]:
            argv += [f"{option}-host", item.original.host or item.name.upper(), f"{option}-port", item.original.port]
    notes = ["a toy for one prefill and one decode instance; from 0.16.0 on it moves no KV any more"]
    return argv, f"vllm-project/vllm, tag v{target}, {TOY_PATH}", notes
