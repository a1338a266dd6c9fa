"""`mooncake-v0 launch` read as the vLLM commands that it runs. Called by `deployment`.

Only the options that end up in those commands matter here; what stands behind `--` goes to vLLM as it is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Sequence

from mooncake_v0.migrate.json_values import compact, json_scalar
from mooncake_v0.migrate.records import Invocation

_ROLES = {"prefill": ("kv_producer", 0, "8100"), "decode": ("kv_consumer", 1, "8200")}
# options of `launch` without a value; all others take one
_ALONE = frozenset(["--print", "--no-check", "--serve-metadata"])


def launched(invocation: Invocation) -> list[Invocation]:
    """The servers that one `mooncake-v0 launch` starts, as invocations; none for any other command."""
    words = _words(invocation.argv)
    if words is None:
        return []
    options, positional, flags = _split(words)
    what, file = (*positional, "", "")[:2]
    roles = ("prefill", "decode") if what == "pair" else (what,) if what in _ROLES else ()
    return [_server(invocation, role, file, options, flags) for role in roles]


def _words(argv: Sequence[str]) -> Sequence[str] | None:
    """What stands behind `mooncake-v0 launch` or `python -m mooncake_v0 launch`."""
    for index in range(len(argv) - 1):
        if re.fullmatch(r"(?:.*/)?mooncake[-_]v0", argv[index]) and argv[index + 1] == "launch":
            return argv[index + 2 :]
    return None


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    options: dict[str, str] = {}
    positional: list[str] = []
    index = 0
    while index < len(words) and words[index] != "--":
        name, equals, value = words[index].partition("=")
        if not name.startswith("--"):
            positional.append(words[index])
        elif equals or name in _ALONE:
            options[name] = value
        else:
            index += 1
            options[name] = words[index] if index < len(words) else ""
        index += 1
    return options, positional, list(words[index + 1 :])


def _server(invocation: Invocation, role: str, file: str, options: dict[str, str], flags: Sequence[str]) -> Invocation:
    kv_role, rank, port = _ROLES[role]
    size = json_scalar(options.get("--kv-buffer-size", "2e9"))
    kv = {"kv_connector": "MooncakeConnector", "kv_role": kv_role, "kv_rank": rank, "kv_parallel_size": 2}
    argv = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", options.get("--model", "")]
    argv += ["--port", options.get(f"--{role}-port", port)]
    argv += ["--tensor-parallel-size", options["--tp"]] if options.get("--tp", "1") != "1" else []
    argv += [*flags, "--kv-transfer-config", compact({**kv, "kv_buffer_size": size})]
    env = {**dict(invocation.env), "MOONCAKE_CONFIG_PATH": file}
    gpus = options.get(f"--{role}-gpus")
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = gpus
    return replace(invocation, argv=tuple(argv), env=tuple(env.items()), launched_by_us=True)
