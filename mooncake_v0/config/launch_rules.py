"""The rules about one launch command (`config.launch`)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Iterator, Mapping

from mooncake_v0.config.addresses import MetadataAddress, is_loopback
from mooncake_v0.config.launch import Launch, known_flags
from mooncake_v0.config.model import MAX_RANKS
from mooncake_v0.config.rules.registry import Checks, Finding, explain_only
from mooncake_v0.config.source import shorten
from mooncake_v0.errors import ERROR, INFO, WARNING

LONG_CONTEXT_TOKENS = 32768  # vLLM 0.6.4.post1, engine/arg_utils.py: above it chunked prefill is on by itself
# flags of later versions that people bring along, and what to do on the pin
LATER_FLAGS: Mapping[str, str] = {
    "--no-enable-prefix-caching": "remove it; the pin has prefix caching off by default",
    "--no-enable-chunked-prefill": "write --enable-chunked-prefill=False",
    "--speculative-config": "remove it; speculative decoding is not possible with transfer",
    "--data-parallel-size": "remove it; run several pairs behind the proxy",
    "--compilation-config": "remove it",
    "--enable-expert-parallel": "remove it",
}
OLD_VARIABLES = ("VLLM_DISTRIBUTED_KV_ROLE", "VLLM_DISTRIBUTED_KV_RANK", "MC_METADATA_SERVER")

LAUNCH_RULES: Checks[Launch] = Checks()

explain_only(
    "launch-not-found",
    ERROR,
    """A file given with --launch holds no command that starts vLLM's API server.

    Read are shell scripts, systemd and supervisord units, compose files and Kubernetes manifests, for `vllm serve` and
    `python -m vllm.entrypoints.openai.api_server`.
    """,
    __name__,
)


def option(name: str) -> tuple[str, ...]:
    """The path of a finding about a flag; rendered without the "$" of JSON paths."""
    return (name,)


@LAUNCH_RULES.rule(ERROR)
def launch_arguments(launch: Launch) -> Iterator[Finding]:
    """vLLM's parser refuses the command line: a flag without its value, or one value too many."""
    if launch.problem:
        yield Finding((), launch.problem, "complete the command; `vllm serve --help` shows each flag")


@LAUNCH_RULES.rule(ERROR)
def launch_flag_unknown(launch: Launch) -> Iterator[Finding]:
    """A flag that vLLM 0.6.4.post1 does not have, so that it stops with "unrecognized arguments".

    Flags of later versions are a frequent reason; the finding names the pin's closest flag, if there is one.
    """
    names = [flag for flag, _, _ in known_flags()]
    for name in launch.unknown:
        plain = name.replace("_", "-")
        near = difflib.get_close_matches(plain, names, n=1, cutoff=0.8)
        fix = LATER_FLAGS.get(plain) or (f"write {near[0]}" if near else "remove it")
        yield Finding(option(shorten(name)), f"vLLM 0.6.4.post1 has no flag {shorten(name)}", fix)


@LAUNCH_RULES.rule(ERROR)
def launch_no_transfer(launch: Launch) -> Iterator[Finding]:
    """MOONCAKE_CONFIG_PATH is set, but --kv-transfer-config is missing: a plain vLLM without transfer starts."""
    if (
        launch.flags.get("kv_transfer_config") is None
        and "MOONCAKE_CONFIG_PATH" in launch.environment
        and not launch.problem
    ):
        fix = 'add --kv-transfer-config \'{"kv_connector":"MooncakeConnector",...}\', or remove MOONCAKE_CONFIG_PATH'
        yield Finding(
            option("--kv-transfer-config"), "MOONCAKE_CONFIG_PATH is set, but --kv-transfer-config is missing", fix
        )


@LAUNCH_RULES.rule(ERROR)
def launch_config_path(launch: Launch) -> Iterator[Finding]:
    """--kv-transfer-config is given, but MOONCAKE_CONFIG_PATH is not set for the command.

    The connector finds the mooncake.json by that variable. Set it in the same line, or export it before.
    """
    if launch.flags.get("kv_transfer_config") is not None and not launch.environment.get("MOONCAKE_CONFIG_PATH"):
        fix = "put MOONCAKE_CONFIG_PATH=/path/to/mooncake.json before the command"
        yield Finding(
            option("MOONCAKE_CONFIG_PATH"), "--kv-transfer-config is given, but MOONCAKE_CONFIG_PATH is not set", fix
        )


@LAUNCH_RULES.rule(ERROR)
def launch_tensor_parallel(launch: Launch) -> Iterator[Finding]:
    """--tensor-parallel-size is not a number of 1 to 16. The port plan has room for 16 ranks on one host."""
    value = launch.flag("tensor_parallel_size")
    if launch.transfers and value is not None and launch.tensor_parallel_size is None:
        what = f"--tensor-parallel-size is {shorten(value)}, the port plan has 1 to {MAX_RANKS}"
        yield Finding(option("--tensor-parallel-size"), what, f"use 1 to {MAX_RANKS}")


@LAUNCH_RULES.rule(ERROR)
def launch_pipeline_parallel(launch: Launch) -> Iterator[Finding]:
    """--pipeline-parallel-size above 1. A stage has no hidden states to send for the whole model; V0 never had it."""
    if launch.transfers and (launch.number("pipeline_parallel_size") or 1) > 1:
        what = f"--pipeline-parallel-size is {launch.flag('pipeline_parallel_size')}, with transfer it must be 1"
        yield Finding(option("--pipeline-parallel-size"), what, "use 1, and more --tensor-parallel-size instead")


@LAUNCH_RULES.rule(ERROR)
def launch_speculative(launch: Launch) -> Iterator[Finding]:
    """Speculative decoding together with transfer. The draft model's cache is not transferred."""
    if launch.transfers and launch.flags.get("speculative_model") is not None:
        yield Finding(
            option("--speculative-model"),
            "speculative decoding is not possible with transfer",
            "remove --speculative-model",
        )


@LAUNCH_RULES.rule(ERROR)
def launch_multi_step(launch: Launch) -> Iterator[Finding]:
    """--num-scheduler-steps above 1. Multi-step scheduling does not come back to the connector between the steps."""
    if launch.transfers and (launch.number("num_scheduler_steps") or 1) > 1:
        what = f"--num-scheduler-steps is {launch.flag('num_scheduler_steps')}, with transfer it must be 1"
        yield Finding(option("--num-scheduler-steps"), what, "remove it, or use 1")


@LAUNCH_RULES.rule(ERROR)
def launch_task(launch: Launch) -> Iterator[Finding]:
    """--task embedding. An embedding model has no decode phase to hand over to."""
    if launch.transfers and launch.flag("task") == "embedding":
        yield Finding(
            option("--task"), "an embedding model has nothing to transfer", "start it without --kv-transfer-config"
        )


@LAUNCH_RULES.rule(INFO)
def launch_chunked_prefill(launch: Launch) -> Iterator[Finding]:
    """Chunked prefill on the decode side: asked for, or on by itself because --max-model-len is above 32768.

    The plugin switches it off there with a line in the log, since a chunk is not a prompt that could be looked up. On
    the prefill side it works.
    """
    if launch.role != "decode":
        return
    asked = launch.flags.get("enable_chunked_prefill")
    if asked is not None and str(asked).lower() not in ("false", "0"):
        fix = "remove it from decode; on prefill it works"
        yield Finding(option("--enable-chunked-prefill"), "chunked prefill is switched off on the decode side", fix)
    elif asked is None and (launch.number("max_model_len") or 0) > LONG_CONTEXT_TOKENS:
        what = f"--max-model-len above {LONG_CONTEXT_TOKENS} turns chunked prefill on, the plugin turns it off again"
        yield Finding(option("--max-model-len"), what, "write --enable-chunked-prefill=False to say the same")


@LAUNCH_RULES.rule(ERROR)
def launch_engine_v1(launch: Launch) -> Iterator[Finding]:
    """VLLM_USE_V1=1 starts the V1 engine of 0.6.4.post1, an early one without any transfer."""
    if launch.environment.get("VLLM_USE_V1", "0").strip() not in ("0", ""):
        yield Finding(
            option("VLLM_USE_V1"),
            "VLLM_USE_V1 is set",
            "remove it, or set it to 0",
        )


@LAUNCH_RULES.rule(ERROR)
def launch_engine_variable(launch: Launch) -> Iterator[Finding]:
    """A MC_ variable with a value at which the transfer engine ends its process, or stops transferring.

    Measured with 0.3.3.post2: MC_MTU other than 512, 1024, 2048, 4096 exits at import; MC_HANDSHAKE_LISTEN_BACKLOG that
    is no number aborts at import; MC_USE_IPV6 makes every tcp transfer fail; MC_LOG_DIR aborts when both of the
    engine's modules are imported.
    """
    environment = launch.environment
    mtu, backlog = environment.get("MC_MTU"), environment.get("MC_HANDSHAKE_LISTEN_BACKLOG")
    if mtu is not None and "$" not in mtu and mtu not in ("512", "1024", "2048", "4096"):
        yield Finding(
            option("MC_MTU"),
            f"MC_MTU is {shorten(mtu)!r}",
            "use 512, 1024, 2048 or 4096",
        )
    if backlog is not None and "$" not in backlog and not backlog.isdecimal():
        yield Finding(
            option("MC_HANDSHAKE_LISTEN_BACKLOG"),
            f"MC_HANDSHAKE_LISTEN_BACKLOG is {shorten(backlog)!r}",
            "write a number, for example 128",
        )
    if "MC_USE_IPV6" in environment:
        yield Finding(
            option("MC_USE_IPV6"),
            "MC_USE_IPV6 is set, at any value it turns IPv6 on",
            "remove it",
        )


@LAUNCH_RULES.rule(WARNING)
def launch_old_variable(launch: Launch) -> Iterator[Finding]:
    """A variable of an older Mooncake integration, which nothing reads any more.

    The first integration took its addresses from environment variables; now they are in the mooncake.json.
    """
    for name in OLD_VARIABLES:
        if name in launch.environment:
            yield Finding(option(name), f"{name} has no effect", "remove it; the addresses are in the mooncake.json")


@dataclass(frozen=True)
class Proxied:
    """A command's proxy variables against the metadata server that its engine connects to."""

    environment: Mapping[str, str]
    metadata: MetadataAddress


PROXY_RULES: Checks[Proxied] = Checks()


# which variable a client obeys for a URL of this scheme: libcurl for http (never HTTP_PROXY), Go's grpc for etcd
PROXY_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "http": ("http_proxy", "all_proxy", "ALL_PROXY"),
    "https": ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"),
    "etcd": ("https_proxy", "HTTPS_PROXY"),
}


@PROXY_RULES.rule(INFO)
def http_proxy(proxied: Proxied) -> Iterator[Finding]:
    """A proxy variable is set, and no_proxy does not name the metadata server.

    The engine's http client obeys http_proxy and then fails with -1, and etcd's client obeys https_proxy. This
    package's agents exempt the metadata server for themselves; whatever else uses it from this environment does not.
    """
    names = PROXY_VARIABLES.get(proxied.metadata.scheme, ())
    found = next((name for name in names if proxied.environment.get(name)), None)
    if found is None:
        return
    exempt = proxied.environment.get("no_proxy") or proxied.environment.get("NO_PROXY") or ""
    for host, _ in proxied.metadata.hosts:
        exempt_by_itself = proxied.metadata.kind == "etcd" and is_loopback(host)  # Go's rule; libcurl has none
        if not exempt_by_itself and not _exempt(host, exempt):
            what = f"{found} is set and no_proxy does not name {host}"
            yield Finding(option(found), what, f"set no_proxy={','.join(part for part in (exempt, host) if part)}")
            return


def _exempt(host: str, no_proxy: str) -> bool:
    suffixes = [part.strip().lower() for part in no_proxy.split(",") if part.strip()]
    plain = host.lower().rstrip(".")
    return "*" in suffixes or any(
        plain == part.lstrip(".") or plain.endswith("." + part.lstrip(".")) for part in suffixes
    )
