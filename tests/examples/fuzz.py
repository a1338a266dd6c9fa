"""Coverage-guided fuzzing of the loader: python -m tests.examples.fuzz [SECONDS]

Needs `pip install atheris` (not in the test extra: it is large, and CI does not run this). Starts from the example
files. Any exception, a result that breaks its promises, or a text that this parser and the standard library read
differently ends it with a crash file. Without SECONDS it runs for ten minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mooncake_v0"]):
    from mooncake_v0.config.check import check_bytes
    from mooncake_v0.config.fix import fixed_bytes
    from mooncake_v0.config.kv_transfer import check_kv_transfer_config
    from mooncake_v0.config.rules import CheckOptions
    from mooncake_v0.errors import ERROR

HERE = Path(__file__).parent
DEFAULT_S = 600


def one_input(data: bytes) -> None:
    """What must hold for any bytes."""
    checked = check_bytes(data)
    assert (checked.config is None) == any(item.severity == ERROR for item in checked.diagnostics)
    for item in checked.diagnostics:
        assert item.what.isprintable() and item.fix and item.line and item.column, item
    if not checked.document.problems and checked.document.complete:
        assert json.dumps(json.loads(data.decode())) == json.dumps(checked.document.value)
    fixed = fixed_bytes(data, CheckOptions())
    assert check_bytes(fixed).config == checked.config
    check_kv_transfer_config(data.decode("utf-8", "replace"))


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_S
    with tempfile.TemporaryDirectory() as corpus:
        for path in HERE.glob("*valid/*.json"):
            (Path(corpus) / path.name).write_bytes(path.read_bytes())
        atheris.Setup([sys.argv[0], corpus, f"-max_total_time={seconds}", "-max_len=2048", "-timeout=5"], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
