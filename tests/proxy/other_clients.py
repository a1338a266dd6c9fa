"""Clients that the test suite cannot carry with it, against the proxy over a real pair.

    python -m tests.proxy.other_clients vllm-0.6.4.post1.tar.gz --litellm-python /path/to/venv/bin/python

vLLM's own benchmarks/benchmark_serving.py from its source archive (completions and chat), and LiteLLM from a virtual
environment that has it. Prints one JSON object; exit code 1 when a client met an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Optional

import click

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import Pair, PairOptions
from mooncake_v0.pin.tiny_model import CPU_DTYPE, make_tiny_model

PROMPTS = 60
VLLM_ARGS = ("--dtype", CPU_DTYPE, "--max-model-len", "4096", "--disable-log-requests", "--served-model-name", "tiny")

ASK_WITH_LITELLM = """
import json, sys
import litellm
litellm.suppress_debug_info = True
options = dict(api_base=sys.argv[1] + "/v1", api_key="none", max_tokens=6, temperature=0, num_retries=0)
messages = [{"role": "user", "content": "hello"}]
whole = litellm.completion(model="openai/tiny", messages=messages, **options)
stream = litellm.completion(model="openai/tiny", messages=messages, stream=True, **options)
streamed = "".join(piece.choices[0].delta.content or "" for piece in stream)
text = litellm.text_completion(model="text-completion-openai/tiny", prompt="hello", **options)
try:
    litellm.completion(model="openai/unknown", messages=messages, **options)
    refused = "no"
except litellm.NotFoundError:
    refused = "yes"
same = whole.choices[0].message.content == streamed
print(json.dumps({"same": same, "text": bool(text.choices[0].text), "refused": refused}))
"""


def unpack_benchmarks(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        root = tar.getnames()[0].split("/")[0]
        for name in ("benchmark_serving.py", "backend_request_func.py", "sonnet.txt"):
            source = tar.extractfile(f"{root}/benchmarks/{name}")
            assert source is not None
            (folder / name).write_bytes(source.read())
    # imported by the script, used only for prompts from a hub
    (folder / "datasets.py").write_text("load_dataset = None\n")
    return folder / "benchmark_serving.py"


def benchmark(script: Path, url: str, model: str, backend: str, endpoint: str) -> dict[str, Any]:
    """One run of vLLM's benchmark; its own figures."""
    result = script.with_name(f"{backend}.json")
    command = [sys.executable, str(script), "--backend", backend, "--base-url", url, "--endpoint", endpoint]
    command += ["--model", "tiny", "--tokenizer", model, "--num-prompts", str(PROMPTS), "--request-rate", "20"]
    command += ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "16"]
    command += ["--save-result", "--result-dir", str(script.parent), "--result-filename", result.name]
    run = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode != 0 or not result.exists():
        return {"completed": 0, "error": run.stderr[-800:]}
    figures = json.loads(result.read_text())
    return {key: figures[key] for key in ("completed", "median_ttft_ms", "median_itl_ms", "request_throughput")}


def ask_with_litellm(python: str, url: str) -> dict[str, Any]:
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run = subprocess.run(
        [python, "-c", ASK_WITH_LITELLM, url], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    if run.returncode != 0:
        return {"error": run.stderr[-800:]}
    answer: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return answer


def ask_all(archive: Path, litellm_python: Optional[str], folder: Path) -> dict[str, Any]:
    model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    options = PairOptions(model, folder / "pair", kv_buffer_size=2e8, vllm_args=VLLM_ARGS, environment=environment)
    pair = Pair(options)
    script = unpack_benchmarks(archive, folder)
    try:
        pair.start_all()
        pair.wait_connected()
        result: dict[str, Any] = {
            "benchmark_serving completions": benchmark(script, pair.proxy_url, model, "vllm", "/v1/completions"),
            "benchmark_serving chat": benchmark(script, pair.proxy_url, model, "openai-chat", "/v1/chat/completions"),
            "decode": pair.agent_status("decode").counters,
        }
        if litellm_python is not None:
            result["litellm"] = ask_with_litellm(litellm_python, pair.proxy_url)
    finally:
        pair.stop_all()
    return result


@click.command(help=__doc__)
@click.argument("archive", type=click.Path(exists=True, path_type=Path))
@click.option("--litellm-python", help="Python of a virtual environment with LiteLLM.")
def main(archive: Path, litellm_python: Optional[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = ask_all(archive, litellm_python, Path(folder))
    print(json.dumps(result, indent=1))
    benchmarks = [value for key, value in result.items() if key.startswith("benchmark_serving")]
    good = all(one["completed"] == PROMPTS for one in benchmarks) and "error" not in result.get("litellm", {})
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
