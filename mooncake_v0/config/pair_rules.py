"""The rules about prefill's and decode's launch commands against each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Callable, Iterator, Sequence

from mooncake_v0.config.launch import Launch
from mooncake_v0.config.launch_rules import option
from mooncake_v0.config.rules.registry import Checks, Finding
from mooncake_v0.config.source import shorten
from mooncake_v0.errors import ERROR, WARNING


@dataclass(frozen=True)
class Pair:
    """Two commands that were read together."""

    first: Launch
    second: Launch
    one_machine: bool

    @property
    def same_config(self) -> bool:
        return self.first.environment.get("MOONCAKE_CONFIG_PATH") == self.second.environment.get("MOONCAKE_CONFIG_PATH")

    @property
    def places(self) -> str:
        """Where the two commands are, for a message."""
        one, other = self.first, self.second
        if one.path == other.path:
            return f"lines {one.line} and {other.line}"
        return f"{one.path}:{one.line} and {other.path}:{other.line}"

    @property
    def is_one_pair(self) -> bool:
        """Whether both are of one prefill/decode pair: in one script, two files in MOONCAKE_CONFIG_PATH mean two pairs."""
        return self.same_config or self.first.path != self.second.path


PAIR_RULES: Checks[Pair] = Checks()


def pairs(launches: Sequence[Launch], on_one_machine: Callable[[Launch], bool | None]) -> Iterator[Pair]:
    """Every two commands with --kv-transfer-config.

    on_one_machine: what the command's mooncake.json says, None if it is not known; then two commands in one file, for
    one host, are taken to run on one machine
    """
    transferring = [launch for launch in launches if launch.kv_text is not None]
    for first, second in combinations(transferring, 2):
        known = on_one_machine(first)
        in_one_file = first.path == second.path and first.host == second.host
        yield Pair(first, second, in_one_file if known is None else known)


@PAIR_RULES.rule(ERROR)
def pair_same_role(pair: Pair) -> Iterator[Finding]:
    """Both commands have the same kv_role. A pair is one kv_producer and one kv_consumer.

    Two pairs in one script are right; then each mooncake.json (MOONCAKE_CONFIG_PATH) names one pair.
    """
    if pair.first.role is not None and pair.first.role == pair.second.role and pair.same_config:
        what = f"both commands ({pair.places}) are {pair.first.role} of one mooncake.json"
        yield Finding(
            ("--kv-transfer-config", "kv_role"),
            what,
            "make one kv_producer with kv_rank 0, one kv_consumer with kv_rank 1",
        )


@PAIR_RULES.rule(ERROR)
def pair_differs(pair: Pair) -> Iterator[Finding]:
    """Prefill and decode differ in something that makes the blocks of their KV caches different.

    The tensor parallel size, the block size, the types of weights and cache, and the quantization must be the same.
    The two sides compare these when they meet, and transfer nothing if they differ.
    """
    if pair.first.role == pair.second.role or not pair.is_one_pair:
        return
    for name in ("tensor_parallel_size", "block_size", "kv_cache_dtype", "dtype", "quantization"):
        one, other = pair.first.flags.get(name), pair.second.flags.get(name)
        default = "1" if name == "tensor_parallel_size" else None
        if (one or default) != (other or default) and "$" not in f"{one}{other}":
            flag = "--" + name.replace("_", "-")
            what = f"{flag} is {one or 'not given'} for {pair.first.label} and {other or 'not given'} for {pair.second.label}"
            yield Finding(option(flag), what, "give both sides the same")


@PAIR_RULES.rule(WARNING)
def pair_model_differs(pair: Pair) -> Iterator[Finding]:
    """Prefill and decode name different models. Two paths may hold the same model; the two sides compare its config."""
    one, other = pair.first.flag("model"), pair.second.flag("model")
    if pair.is_one_pair and pair.first.role != pair.second.role and one and other and one != other:
        what = f"the model is {shorten(one)} for {pair.first.label} and {shorten(other)} for {pair.second.label}"
        yield Finding(option("--model"), what, "give both sides the same model")


@PAIR_RULES.rule(ERROR)
def pair_api_port(pair: Pair) -> Iterator[Finding]:
    """Two instances on one machine have the same API port. Without --port it is 8000."""
    if pair.one_machine and pair.first.api_port is not None and pair.first.api_port == pair.second.api_port:
        what = f"both commands ({pair.places}) use API port {pair.first.api_port}"
        yield Finding(option("--port"), what, "give one of them another --port")


@PAIR_RULES.rule(ERROR)
def pair_gpus(pair: Pair) -> Iterator[Finding]:
    """Two instances on one machine share a GPU, by CUDA_VISIBLE_DEVICES. Each takes its share of the GPU's memory for
    itself (--gpu-memory-utilization), so the second runs out of memory."""
    one, other = _gpus(pair.first), _gpus(pair.second)
    common = sorted(one & other)
    if pair.one_machine and common:
        what = f"both commands ({pair.places}) use GPU {', '.join(common)}"
        yield Finding(option("CUDA_VISIBLE_DEVICES"), what, "give each instance GPUs of its own")


def _gpus(launch: Launch) -> set[str]:
    text = launch.environment.get("CUDA_VISIBLE_DEVICES", "")
    return set() if "$" in text else {part.strip() for part in text.split(",") if part.strip()}
