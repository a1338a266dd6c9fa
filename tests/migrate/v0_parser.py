"""The real argument parser of vLLM 0.6.4.post1 with our plugin, in a process of its own.

The process imports vLLM as `python -m vllm.entrypoints.openai.api_server` does, so that the flag comes the way it comes in
production. Requests and answers are JSON lines.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from typing import Any

DEADLINE_S = 120

_DRIVER = """
import contextlib, io, json, sys
answers = sys.stdout
sys.stdout = sys.stderr
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils import FlexibleArgumentParser
import vllm
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
for line in sys.stdin:
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            arguments = parser.parse_args(json.loads(line))
            kv = arguments.kv_transfer_config
        answer = {"ok": True, "model": arguments.model, "kv_role": kv and kv.kv_role}
    except SystemExit:
        answer = {"ok": False, "error": errors.getvalue()[-1000:]}
    print(json.dumps(answer), file=answers, flush=True)
"""


class V0Parser:
    """A running driver; every answer has a deadline."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.version = str(self._answer()["version"])

    def parse(self, arguments: list[str]) -> dict[str, Any]:
        """What `python -m vllm.entrypoints.openai.api_server` makes of these words."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(DEADLINE_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.process.kill()
            raise RuntimeError("the V0 parser gave no answer")
        answer: dict[str, Any] = json.loads(line)
        return answer
