"""Rules about the command lines that start vLLM: one command alone, and prefill's and decode's against each other.

The commands come as words and environment; reading scripts and manifests is the caller's job. Flags are parsed by an
argparse parser made from `vllm_flags.csv`, the list that vLLM 0.6.4.post1's own parser gives (a test compares them), so
abbreviations, "_" for "-" and "--flag=value" mean what they mean to vLLM.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, NoReturn, Sequence

from mooncake_v0 import digits
from mooncake_v0.config.json_parser import parse
from mooncake_v0.config.kv_transfer import ROLE_NAMES
from mooncake_v0.config.model import MAX_RANKS, Role

if TYPE_CHECKING:
    import argparse

FLAGS_FILE = Path(__file__).with_name("vllm_flags.csv")
SERVER_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
DEFAULT_API_PORT = 8000
NARGS: Mapping[str, dict[str, Any]] = {
    "one": {},
    "many": {"nargs": "*"},
    "optional": {"nargs": "?", "const": "true"},
    "nothing": {"action": "store_const", "const": "true"},
}


@dataclass(frozen=True)
class Launch:
    """One command that starts vLLM's API server.

    arguments: the words after `vllm serve` or the module's name; environment: the variables set for it
    path, line: where it was read; host: where it runs, if that is known
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    path: str
    line: int = 1
    host: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    problem: str = ""

    def flag(self, name: str) -> str | None:
        """A flag's value as text; None if it is absent or only known to the shell ($TP)."""
        value = self.flags.get(name)
        return value if isinstance(value, str) and "$" not in value else None

    @property
    def transfers(self) -> bool:
        """Whether the command asks for KV transfer; what is said about transfer is not about a plain vLLM."""
        return "kv_transfer_config" in self.flags

    def number(self, name: str) -> int | None:
        return digits.number(self.flag(name))

    @property
    def kv_text(self) -> str | None:
        return self.flag("kv_transfer_config")

    @property
    def role(self) -> Role | None:
        value = parse(self.kv_text or "").value
        name = value.get("kv_role") if isinstance(value, dict) else None
        return ROLE_NAMES.get(name) if isinstance(name, str) else None

    @property
    def tensor_parallel_size(self) -> int | None:
        """Ranks of this instance, where the rules of the port plan can use it."""
        if self.flags.get("tensor_parallel_size") is None:
            return 1
        size = self.number("tensor_parallel_size")
        return size if size is not None and 1 <= size <= MAX_RANKS else None

    @property
    def api_port(self) -> int | None:
        return DEFAULT_API_PORT if self.flags.get("port") is None else self.number("port")

    @property
    def label(self) -> str:
        return self.role or "this instance"


def server_arguments(words: Sequence[str]) -> tuple[str, ...] | None:
    """The words after `vllm serve` or `-m vllm.entrypoints.openai.api_server`; None if they start no vLLM server."""
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "vllm" and tuple(words[index + 1 : index + 2]) == ("serve",):
            return tuple(words[index + 2 :])
        if word == "-m" and index + 1 < len(words) and words[index + 1] in SERVER_MODULES:
            return tuple(words[index + 2 :])
        if name == "api_server.py":
            return tuple(words[index + 1 :])
    return None


def make_launch(
    arguments: Sequence[str], environment: Mapping[str, str], path: str, line: int = 1, host: str = ""
) -> Launch:
    """The command with its flags parsed. Never raises; what argparse refuses becomes `problem`."""
    import argparse  # only launch commands need it

    plain = [_dashes(word) for word in arguments]
    flags: dict[str, Any] = {}
    unknown: list[str] = []
    problem = ""
    try:
        namespace, unknown = _parser().parse_known_args(plain)
        flags = {name: value for name, value in vars(namespace).items() if value is not None}
    except argparse.ArgumentError as error:
        problem = str(error)
    except _WrongArguments as error:
        problem = str(error)
    if flags.get("model_tag") and "model" not in flags:
        flags["model"] = flags["model_tag"]
    names = tuple(word.partition("=")[0] for word in unknown if word.startswith("-") and len(word) > 1)
    return Launch(tuple(arguments), dict(environment), path, line, host, flags, names, problem)


def _dashes(word: str) -> str:
    """vLLM's parser takes _ for - in the names of flags (FlexibleArgumentParser, vllm/utils.py of 0.6.4.post1)."""
    name, separator, value = word.partition("=")
    return name.replace("_", "-") + separator + value if word.startswith("--") else word


@cache
def known_flags() -> tuple[tuple[str, str, str], ...]:
    """(flag, short form or "", how many values it takes) for every flag of the pin, and our --kv-transfer-config."""
    with FLAGS_FILE.open(newline="", encoding="utf-8") as file:
        rows = [(row["flag"], row["short"], row["takes"]) for row in csv.DictReader(file)]
    return (*rows, ("--kv-transfer-config", "", "one"), ("--config", "", "one"))


class _WrongArguments(Exception):
    """What argparse would print before it ends the process."""


@cache
def _parser() -> argparse.ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise _WrongArguments(message)

    parser = Parser(add_help=False)
    parser.add_argument("model_tag", nargs="?")
    for flag, short, takes in known_flags():
        parser.add_argument(*([flag, short] if short else [flag]), dest=flag[2:].replace("-", "_"), **NARGS[takes])
    return parser
