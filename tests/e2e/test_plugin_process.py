"""The plugin in real processes: what a user sees without the flag, with `LLM`, and alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.pin.processes import find_free_range
from tests.e2e.conftest import ENVIRONMENT

GENERATE = """
import json, sys
import psutil
from vllm import LLM, SamplingParams

def main():
    model, transfer = sys.argv[1], json.loads(sys.argv[2])
    extra = {"kv_transfer_config": transfer} if transfer else {}
    llm = LLM(model, dtype="float32", max_model_len=1024, **extra)
    outputs = llm.generate(["one prompt", "and another"], SamplingParams(temperature=0, max_tokens=8, logprobs=2))
    agents = [child.pid for child in psutil.Process().children(True) if "mooncake_v0.transfer.agent" in child.cmdline()]
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    probabilities = [output.outputs[0].cumulative_logprob for output in outputs]
    print("RESULT", json.dumps([tokens, probabilities, len(agents)]))

main()
"""


def generate(model: str, folder: Path, transfer: dict[str, Any], **environment: str) -> list[Any]:
    """Tokens, logprobs and the number of agents of a small offline run in a process of its own."""
    script = folder / "generate.py"
    script.write_text(GENERATE)
    import os

    done = subprocess.run(
        [sys.executable, str(script), model, json.dumps(transfer)],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: list[Any] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def without_package(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """vLLM with both of our ways in switched off, which is vLLM without the package."""
    return generate(
        tiny_model, tmp_path_factory.mktemp("stock"), {}, TORCH_DEVICE_BACKEND_AUTOLOAD="0", VLLM_PLUGINS="quick_start"
    )


def test_without_the_flag_everything_is_as_without_the_package(
    tiny_model: str, tmp_path: Path, without_package: list[Any]
) -> None:
    assert generate(tiny_model, tmp_path, {}) == without_package


def test_llm_with_an_absent_peer_and_metadata_server_serves_alone(
    tiny_model: str, tmp_path: Path, without_package: list[Any]
) -> None:
    base = find_free_range(150)
    config = {"prefill_url": f"127.0.0.1:{base}", "decode_url": f"127.0.0.1:{base}", "protocol": "tcp"}
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({**config, "metadata_server": "http://127.0.0.1:9/metadata"}))
    transfer = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "kv_rank": 1, "kv_parallel_size": 2}

    tokens, probabilities, agents = generate(
        tiny_model, tmp_path, {**transfer, "kv_buffer_size": 1e7}, MOONCAKE_CONFIG_PATH=str(path)
    )

    assert [tokens, probabilities] == without_package[:2]
    assert agents == 1
