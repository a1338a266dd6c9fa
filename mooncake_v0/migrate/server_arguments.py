"""The arguments of a vLLM server, split into flags by what 0.6.4.post1 takes. Called by `deployment`.

Names are made canonical (dashes, full length); values are kept as they are, but those of secrets are masked at once. What
0.6.4.post1 does not know is kept and marked, with as many values as follow it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Sequence

import yaml

from mooncake_v0.migrate.document import load_all
from mooncake_v0.migrate.facts import by_name
from mooncake_v0.migrate.secrets import masked_value

KV_FLAG = "--kv-transfer-config"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
# flags that may be given several times and add up
REPEATED = frozenset(["--middleware", "--ignore-patterns"])


@dataclass(frozen=True)
class Flag:
    """One flag. known: "v0" (0.6.4.post1 has it), "target" (only newer releases do) or "" (nobody does)."""

    name: str
    values: tuple[str, ...]
    known: str = "v0"


@dataclass(frozen=True)
class ServerArguments:
    """entrypoint: "module" (python -m ...) or "serve"; odd: remarks on words that were not plain flags."""

    entrypoint: str
    model: str
    flags: tuple[Flag, ...]
    odd: tuple[str, ...] = ()

    def value(self, *names: str) -> str:
        """The last value of the first of these flags that is there, or ""."""
        found = [flag for flag in self.flags if flag.name in names]
        return " ".join(found[-1].values) if found else ""

    def has(self, *names: str) -> bool:
        return any(flag.name in names for flag in self.flags)


def is_server(argv: Sequence[str]) -> bool:
    """Whether an argument vector starts a vLLM server."""
    return _server_start(argv) is not None


def _server_start(argv: Sequence[str]) -> tuple[str, int] | None:
    if argv[0].rpartition("/")[2] == "vllm" and list(argv[1:2]) == ["serve"]:
        return "serve", 2
    if "-m" in argv and argv.index("-m") + 1 < len(argv):
        index = argv.index("-m")
        if re.fullmatch(r"vllm\.entrypoints\.(?:openai\.)?api_server", argv[index + 1]):
            return "module", index + 2
        if argv[index + 1] == "vllm" and list(argv[index + 2 : index + 3]) == ["serve"]:
            return "serve", index + 3
    return None


def parse_server(argv: Sequence[str]) -> ServerArguments:
    """Split the arguments of a server command; `is_server` must hold."""
    start = _server_start(argv)
    assert start is not None
    entrypoint, index = start
    flags: list[Flag] = []
    odd: list[str] = []
    positional: list[str] = []
    words = list(argv)
    while index < len(words):
        if not _is_flag(words[index]):
            positional.append(words[index])
            index += 1
            continue
        flag, index, remark = _flag(words, index)
        flags.append(flag)
        odd += [remark] if remark else []
    model = positional.pop(0) if positional and entrypoint == "serve" else ""
    odd += [f"{word!r} belongs to no flag" for word in positional]
    named = [flag for flag in flags if flag.name == "--model"]
    model = model or (" ".join(named[-1].values) if named else "")
    return ServerArguments(entrypoint, model, _merged(flags), tuple(odd))


def config_words(text: str) -> list[str]:
    """The flags of a YAML file that `vllm serve --config` names, in the order of the file; [] if it is no mapping."""
    try:
        documents, _ = load_all(text)
    except yaml.YAMLError:
        return []
    values = documents[0] if documents else None
    words: list[str] = []
    for key, value in values.items() if isinstance(values, dict) else ():
        if value is False or value is None:
            continue
        items = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"--{key}", *(json.dumps(item) if isinstance(item, (dict, list)) else str(item) for item in items)]
    return words


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d*\.?\d*", word)


def _flag(words: Sequence[str], index: int) -> tuple[Flag, int, str]:
    written, equals, value = words[index].partition("=")
    name, known, takes = _canonical(written)
    remark = f"{written} is short for {name}" if name != written.replace("_", "-") else ""
    index += 1
    if equals:
        return Flag(name, (masked_value(name, value),), known), index, remark
    following: list[str] = []
    if takes != "0":
        while index < len(words) and not _is_flag(words[index]) and (takes != "1" or not following):
            following.append(words[index])
            index += 1
            if takes == "?":
                break
    if name == KV_FLAG and following:
        index = _whole_object(words, index, following)
    return Flag(name, tuple(masked_value(name, word) for word in following), known), index, remark


def _whole_object(words: Sequence[str], index: int, following: list[str]) -> int:
    """JSON whose quotes were lost and whose spaces therefore split it: take words until the braces close."""
    while (
        following[0].count("{") > following[0].count("}") and index < len(words) and not words[index].startswith("--")
    ):
        following[0] += " " + words[index]
        index += 1
    return index


def _canonical(written: str) -> tuple[str, str, str]:
    """Full name, who knows it, and how many values it takes."""
    name = "--" + written[2:].replace("_", "-") if written.startswith("--") else written
    flags, options = by_name("flags"), by_name("options")
    if name in flags:
        # V1 takes all patterns behind one flag, where V0 repeats the flag; both forms are read
        newer = options[name].takes if name in REPEATED and name in options else ""
        return name, "v0", newer or flags[name].takes
    if name in options or name.partition(".")[0] in options:
        return name, "target", options[name].takes if name in options else "1"
    longer = [known for known in flags if name.startswith("--") and known.startswith(name)]
    if len(longer) == 1:
        return longer[0], "v0", flags[longer[0]].takes
    return name, "", "+"


def _merged(flags: Sequence[Flag]) -> tuple[Flag, ...]:
    """The last of a repeated flag counts, as for argparse; those that add up are kept."""
    last = {flag.name: index for index, flag in enumerate(flags)}
    return tuple(
        flag for i, flag in enumerate(flags) if flag.name in REPEATED or not flag.known or last[flag.name] == i
    )
