"""The proxy that V1 needs, and why the one of today fails without a sign. Called by `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

from mooncake_v0.digits import port_number
from mooncake_v0.migrate.convert import STORE, V1Instance, quote
from mooncake_v0.migrate.deployment import Deployment
from mooncake_v0.migrate.facts import has

EXAMPLE_PATH = "examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py"
OLD_EXAMPLE_PATH = "examples/online_serving/disaggregated_serving/mooncake_connector/mooncake_connector_proxy.py"
TOY_PATH = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
WHY = {
    "documented": "it sends no kv_transfer_params: every request still answers, but decode computes the whole prompt again",
    "vllm-v0": "it sends no kv_transfer_params: every request still answers, but decode computes the whole prompt again",
    "toy": "it sends no transfer_id: requests still answer, but no KV moves; the only sign is Missing transfer_id on prefill",
    "unknown": "it is not known here; without kv_transfer_params and transfer_id decode computes every prompt again",
    "mooncake-v0": "it speaks to V0 instances only: the V0 protocol needs no kv_transfer_params, the V1 protocol does",
    "v1": "it already speaks the V1 protocol; take the file of the target version",
}


@dataclass(frozen=True)
class ProxyPlan:
    """today: one line per proxy found; file and origin: what to get from where; argvs: one command per model."""

    today: tuple[str, ...]
    file: str
    origin: str
    notes: tuple[str, ...]
    argvs: tuple[tuple[str, ...], ...]

    def commands(self) -> list[str]:
        return [" ".join(map(quote, argv)) for argv in self.argvs]


def plan_proxy(deployment: Deployment, instances: Sequence[V1Instance], target: str) -> ProxyPlan | None:
    """The command for all pairs; None if no instance transfers KV."""
    prefills = [item for item in instances if item.bootstrap_port is not None]
    decodes = [item for item in instances if item.role == "decode" and item.original.connector != STORE]
    if not prefills and not decodes:
        return None
    today = tuple(f"{proxy.kind} proxy: {WHY[proxy.kind]}" for proxy in deployment.proxies)
    first = next((proxy.port for proxy in deployment.proxies if port_number(proxy.port)), "8000")
    taken = {item.original.port for item in instances}
    write, file, path, notes = _kind(target)
    argvs: list[tuple[str, ...]] = []
    port = int(first)
    for model in dict.fromkeys(item.original.model for item in [*prefills, *decodes]):
        while str(port) in taken and argvs:
            port += 1
        mine = [[item for item in items if item.original.model == model] for items in (prefills, decodes)]
        argvs.append(tuple(write(mine[0], mine[1], str(port))))
        port += 1
    if len(argvs) > 1:
        notes = ("one proxy per model: it sends any request to any of its instances", *notes)
    return ProxyPlan(
        tuple(dict.fromkeys(today)), file, f"vllm-project/vllm, tag v{target}, {path}", notes, tuple(argvs)
    )


Writer = Callable[[Sequence[V1Instance], Sequence[V1Instance], str], "list[str]"]


def _kind(target: str) -> tuple[Writer, str, str, tuple[str, ...]]:
    """How to write the command for a target, its file, where that is, and remarks."""
    if has("bootstrap_server", target):
        path = EXAMPLE_PATH if has("example_moved", target) else OLD_EXAMPLE_PATH
        return _example, "mooncake_connector_proxy.py", path, _EXAMPLE_NOTES
    return _toy, "toy_proxy_server.py", TOY_PATH, _TOY_NOTES


_EXAMPLE_NOTES = (
    "it is an example, not part of the wheel: copy it from the tag of the version that runs",
    "it asks the bootstrap servers once, at its start: restart it after every restart of a prefill instance",
    "it listens on 127.0.0.1 unless told otherwise, and serves /v1/completions and /v1/chat/completions only",
    "it replaces the client's Authorization header by its own OPENAI_API_KEY",
    "vLLM's router (vllm-project/router, --kv-connector mooncake) is an alternative",
)
_TOY_NOTES = ("a toy for one prefill and one decode instance; from 0.16.0 on it moves no KV any more",)


def url(item: V1Instance) -> str:
    host = item.original.arguments.value("--host")
    host = (
        host
        if host not in ("", "0.0.0.0", "::", "*") and not item.original.host
        else item.original.host or item.name.upper()
    )
    return f"http://[{host}]:{item.original.port}" if ":" in host else f"http://{host}:{item.original.port}"


def _example(prefills: Sequence[V1Instance], decodes: Sequence[V1Instance], port: str) -> list[str]:
    argv = ["python3", "mooncake_connector_proxy.py", "--host", "0.0.0.0", "--port", port]
    for item in prefills:
        argv += ["--prefill", url(item), str(item.bootstrap_port)]
    for item in decodes:
        argv += ["--decode", url(item)]
    return argv


def _toy(prefills: Sequence[V1Instance], decodes: Sequence[V1Instance], port: str) -> list[str]:
    argv = ["python3", "toy_proxy_server.py", "--port", port]
    for option, items in (("--prefiller", prefills), ("--decoder", decodes)):
        for item in items[:1]:
            argv += [f"{option}-host", item.original.host or item.name.upper(), f"{option}-port", item.original.port]
    return argv
