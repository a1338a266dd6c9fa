"""The steps of the move, each with a check after it and the way back. Called by `report`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from mooncake_v0.migrate.convert import V1Instance
from mooncake_v0.migrate.deployment import Deployment
from mooncake_v0.migrate.facts import Fact, applies, has, table
from mooncake_v0.migrate.proxy_plan import ProxyPlan, url


@dataclass(frozen=True)
class Step:
    """do: what to do, in order; check: what must be seen before the next step; back: the way back from here."""

    title: str
    do: tuple[str, ...]
    check: str
    back: str


def steps(deployment: Deployment, instances: Sequence[V1Instance], proxy: ProxyPlan | None, target: str) -> list[Step]:
    """The whole plan; deployments without KV transfer get the short one."""
    plan = [_environment(target), _clients()]
    if proxy is None:
        return [*plan, _plain(instances), _shift(), _retire(deployment)]
    return [
        *plan,
        _group(instances, proxy, target),
        _proof(instances, target),
        _shift(),
        _restart(target),
        _retire(deployment),
    ]


def prerequisites(target: str) -> list[Fact]:
    return [row for row in table("prerequisites") if applies(row, target)]


def _environment(target: str) -> Step:
    engine = next((row.text or row.title for row in prerequisites(target) if row.name == "engine"), "")
    title = next((row.title for row in prerequisites(target) if row.name == "engine"), engine)
    return Step(
        "Build a second environment",
        (
            "a new image or virtual environment with Python 3.12; never upgrade the V0 one in place",
            f"pip install vllm=={target}",
            title,
        ),
        f"vllm --version prints {target}, and python3 -c 'from mooncake.engine import TransferEngine' prints nothing",
        "nothing has changed on the V0 side: remove the new environment",
    )


def _clients() -> Step:
    return Step(
        "Prepare the clients",
        (
            "search clients for guided_json, guided_regex, guided_choice, guided_grammar, best_of and logits processors",
            "change them to structured_outputs or response_format, and to n; keep the old fields until V0 is gone",
            "add the renamed metrics to dashboards beside the old ones",
        ),
        "no client sends a guided_* field or best_of any more (look at a day of request logs of V0)",
        "clients that send both forms work on both sides",
    )


def _plain(instances: Sequence[V1Instance]) -> Step:
    names = ", ".join(item.name for item in instances) or "the instances"
    return Step(
        "Start the V1 instances beside V0",
        (f"start {names} on free GPUs and ports with the commands of this report",),
        "/health answers 200 on each, and a prompt of yours gives a sensible answer",
        "stop the V1 instances; V0 still serves",
    )


def _group(instances: Sequence[V1Instance], proxy: ProxyPlan, target: str) -> Step:
    prefills = [item for item in instances if item.bootstrap_port is not None]
    decodes = [item for item in instances if item.role == "decode"]
    what = "prefill, decode, bootstrap and proxy" if has("bootstrap_server", target) else "prefill, decode and proxy"
    checks = [f"{url(item)}/health answers 200" for item in [*prefills, *decodes]]
    if has("bootstrap_server", target):
        checks += [
            f"GET {url(item).rpartition(':')[0]}:{item.bootstrap_port}/query names engine_id and worker_addr"
            for item in prefills
        ]
    return Step(
        "Bring up a complete V1 group beside the V0 pair",
        (
            f"open the ports of this report, then start {what} on other GPUs (or at a quiet hour on the same ones)",
            f"get the proxy from {proxy.origin}",
            *(f"start it: {command}" for command in proxy.commands()),
            "never mix: a V0 prefill cannot feed a V1 decode, so both sides of a group are replaced together",
        ),
        "; ".join(checks),
        "stop the V1 group; the V0 pair, its proxy and its metadata service were not touched",
    )


def _proof(instances: Sequence[V1Instance], target: str) -> Step:
    prefill = next((item for item in instances if item.bootstrap_port is not None), None)
    metrics = f"{url(prefill)}/metrics" if prefill else "/metrics of prefill"
    signs = (
        f"vllm:mooncake_bytes_transferred at {metrics} grows with every prompt, and no log has Missing transfer_id or "
        "invalid KVTransferParams"
        if has("heterogeneous_tp", target)
        else "the prefill log shows transfers and the decode log shows no prefill of the same prompt"
    )
    return Step(
        "Prove that KV moves",
        (
            "send prompts of 10, 1,000 and max-model-len minus 100 tokens through the V1 proxy",
            "send one prompt whose answer ends at its first token, and one that is cancelled half way",
            "compare answers at temperature 0 with V0 (they may differ in a few tokens: kernels changed)",
        ),
        f"{signs}; correct answers alone prove nothing, because decode recomputes without a word",
        "stop the V1 group",
    )


def _shift() -> Step:
    return Step(
        "Shift traffic at the front",
        (
            "1 % of requests to V1 for an hour, then 10 %, 50 %, 100 %, each step at least one busy hour",
            "compare TTFT, ITL, throughput, GPU memory and error rates: defaults have moved, so expect different numbers",
        ),
        "TTFT and ITL at the 99th percentile are no worse than on V0, and the error rate is the same",
        "send all requests to the V0 proxy again; it is still running",
    )


def _restart(target: str) -> Step:
    do: tuple[str, ...] = ("restart the prefill instance under light load",)
    if has("bootstrap_server", target):
        do += ("then restart the proxy, which asks the bootstrap servers only when it starts",)
    return Step(
        "Rehearse a restart",
        do,
        "KV moves again afterwards (the check of the step before last)",
        "send all requests to the V0 proxy",
    )


def _retire(deployment: Deployment) -> Step:
    kinds = sorted({kind for kind, _ in deployment.metadata_services})
    service = f"the metadata service ({', '.join(kinds)})" if kinds else "the metadata service"
    return Step(
        "Retire V0",
        (
            "keep the V0 deployment stopped but ready for two weeks",
            f"then remove the V0 instances, the V0 proxy, {service} and mooncake.json"
            if deployment.pairs
            else "then remove the V0 instances",
            "close the V0 ports",
        ),
        "nothing connects to the V0 ports any more (ss -tn on its hosts)",
        "start the V0 deployment again; within the two weeks nothing of it is gone",
    )
