"""What `mooncake-v0 launch` starts, as data: the documented commands with the right --kv-transfer-config. No I/O."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Sequence

from mooncake_v0.config.model import Role

KV_ROLES: Mapping[Role, tuple[str, int]] = {"prefill": ("kv_producer", 0), "decode": ("kv_consumer", 1)}
API_MODULE = "vllm.entrypoints.openai.api_server"
# set by launch itself; twice on one command line the later one would win silently
OWN_FLAGS = ("--model", "--port", "--tensor-parallel-size", "-tp", "--kv-transfer-config")


@dataclass(frozen=True)
class Command:
    """One process: its words, the variables added to the environment, and the URL that answers 200 once it serves."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    ready_url: str

    def as_shell(self) -> str:
        """One line for a POSIX shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(shlex.quote, self.words)])


@dataclass(frozen=True)
class Instance:
    """One vLLM server. kv_buffer_size in bytes per rank; extra: the user's own vLLM flags."""

    role: Role
    config_path: Path
    model: str
    api_port: int
    ranks: int = 1
    kv_buffer_size: int = 2_000_000_000
    extra: Sequence[str] = ()
    gpus: str | None = None
    python: str = field(default_factory=lambda: sys.executable)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words after `-m vllm.entrypoints.openai.api_server`."""
        tensor_parallel = ("--tensor-parallel-size", str(self.ranks)) if self.ranks > 1 else ()
        words = ("--model", self.model, "--port", str(self.api_port), *tensor_parallel, *self.extra)
        return (*words, "--kv-transfer-config", kv_transfer_config(self.role, self.kv_buffer_size))

    @property
    def environment(self) -> dict[str, str]:
        gpus = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        return {"MOONCAKE_CONFIG_PATH": str(self.config_path), **gpus}

    @property
    def api_host(self) -> str:
        """Where the API can be asked from this host."""
        host = flag_value(self.extra, "--host")
        return "127.0.0.1" if host in (None, "", "0.0.0.0") else str(host)

    @property
    def api_url(self) -> str:
        return f"http://{self.api_host}:{self.api_port}"

    def command(self) -> Command:
        words = (self.python, "-m", API_MODULE, *self.arguments)
        return Command(self.role, words, self.environment, f"{self.api_url}/health")


def kv_transfer_config(role: Role, kv_buffer_size: int) -> str:
    """The documented JSON for one side."""
    kv_role, kv_rank = KV_ROLES[role]
    return (
        f'{{"kv_connector":"MooncakeConnector","kv_role":"{kv_role}","kv_rank":{kv_rank},'
        f'"kv_parallel_size":2,"kv_buffer_size":{short_number(kv_buffer_size)}}}'
    )


def short_number(number: int) -> str:
    """2000000000 as 2e9, as the documentation writes it; a number with many digits as it is."""
    digits = str(number).rstrip("0")
    zeros = len(str(number)) - len(digits)
    return f"{digits}e{zeros}" if zeros >= 6 and len(digits) == 1 else str(number)


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, written as `--flag value` or `--flag=value`."""
    found = None
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
    return found


def own_flag_in(words: Sequence[str]) -> str | None:
    """The first of the user's words that launch sets itself."""
    names = [word.partition("=")[0].replace("_", "-") if word.startswith("--") else word for word in words]
    return next((name for name in names if name in OWN_FLAGS), None)


def proxy_command(host: str, port: int, prefill: Instance, decode: Instance) -> Command:
    """The proxy in front of the pair."""
    listen = ("--host", host, "--port", str(port))
    pair = ("--prefill", prefill.api_url, "--decode", decode.api_url)
    asked = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return Command(
        "proxy", (sys.executable, "-m", "mooncake_v0", "proxy", *listen, *pair), {}, f"http://{asked}:{port}/health"
    )


def metadata_command(host: str, port: int) -> Command:
    """Our own metadata server, at the address that mooncake.json names."""
    words = (sys.executable, "-m", "mooncake_v0", "metadata", "serve", "--host", host, "--port", str(port))
    return Command("metadata", words, {}, f"http://{host}:{port}/health")
