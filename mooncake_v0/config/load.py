"""From a path to a `MooncakeConfig`. The vLLM plugin calls `load_config` at start; it needs neither torch nor vLLM."""

from __future__ import annotations

from pathlib import Path

from mooncake_v0.config.check import check_bytes, read_bytes
from mooncake_v0.config.model import MooncakeConfig
from mooncake_v0.config.rules import CheckOptions
from mooncake_v0.errors import ERROR, ConfigError


def load_config(path: str | Path, *, tensor_parallel_size: int | None = None) -> MooncakeConfig:
    """The checked configuration in the file. Warnings do not keep a file from loading.

    tensor_parallel_size: ranks of each side, 1..16; without it the ports of every size must fit.
    Raises CouldNotCheckError if the file cannot be read, ConfigError (with its diagnostics) if it is not valid.
    """
    checked = check_bytes(read_bytes(path), CheckOptions(tensor_parallel_size=tensor_parallel_size))
    if checked.config is not None:
        return checked.config
    errors = [item for item in checked.diagnostics if item.severity == ERROR]
    lines = [f"{path}:{item.line or 1}: {item.where}: {item.what}; {item.fix} [{item.rule}]" for item in errors]
    raise ConfigError(
        "\n  ".join([f"{path} is not valid:", *lines]),
        fix=f"run `mooncake-v0 validate {path}` until it is",
        diagnostics=checked.diagnostics,
    )
