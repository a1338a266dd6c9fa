"""vLLM 0.6.4.post1's own tests of its OpenAI server, run against a plain instance and against the proxy over a pair.

    python -m tests.proxy.vllm_suites vllm-0.6.4.post1.tar.gz

The archive is vLLM's source archive from the package index. Its tests of completions and chat run as they are; only the
module that would start a server for each of them is replaced by one that names a server that runs already, and the big
models by the tiny one, served under their names. Not every test can pass on a model that knows nothing; what counts is
that through the proxy the same ones pass as without it. Prints one JSON object; exit code 1 when the outcomes differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import click

from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.processes import Pair, PairOptions, find_free_port
from mooncake_v0.pin.tiny_model import CPU_DTYPE, make_tiny_model

SUITES = ("test_completion", "test_chat")
NAMES = ("HuggingFaceH4/zephyr-7b-beta", "zephyr-lora", "zephyr-lora2", "zephyr-pa", "zephyr-pa2")
VLLM_ARGS = ("--dtype", CPU_DTYPE, "--max-model-len", "8192", "--disable-log-requests", "--served-model-name", *NAMES)

RUNNING_SERVER = '''
"""A server that runs already, in place of the one that the tests would start."""
import os
import openai


class RemoteOpenAIServer:
    DUMMY_API_KEY = "none"

    def __init__(self, model, vllm_serve_args, **options):
        self.url_root = os.environ["SERVER_URL"]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def url_for(self, *parts):
        return "/".join([self.url_root, *parts])

    def get_client(self):
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY)

    def get_async_client(self):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=self.DUMMY_API_KEY, max_retries=0)
'''
LOCAL_MODEL = '''
"""The tiny model wherever the tests would fetch one."""
import os
import huggingface_hub
import transformers
import vllm.transformers_utils.tokenizer as tokenizer_module

folder = os.environ["MODEL_FOLDER"]
from_pretrained = transformers.AutoTokenizer.from_pretrained
get_tokenizer = tokenizer_module.get_tokenizer
huggingface_hub.snapshot_download = lambda *args, **options: folder
transformers.AutoTokenizer.from_pretrained = lambda *args, **options: from_pretrained(folder)
tokenizer_module.get_tokenizer = lambda *args, **options: get_tokenizer(folder)
'''


def unpack(archive: Path, folder: Path) -> Path:
    """The suites, with a server that runs already and without what only the real models need."""
    with tarfile.open(archive) as tar:
        root = tar.getnames()[0].split("/")[0]
        openai_tests = f"{root}/tests/entrypoints/openai/"
        wanted = [openai_tests + f"{name}.py" for name in (*SUITES, "__init__")]
        wanted += [f"{root}/tests/entrypoints/{name}" for name in ("__init__.py", "conftest.py")]
        for name in wanted:
            source = tar.extractfile(name)
            assert source is not None
            target = folder / name[len(root) + 1 :]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read())
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "utils.py").write_text(RUNNING_SERVER)
    (folder / "conftest.py").write_text(LOCAL_MODEL)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def run(folder: Path, url: str, model: str) -> dict[str, str]:
    """Test → passed, failed or skipped."""
    report = folder / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--timeout",
        "120",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    command += [f"tests/entrypoints/openai/{name}.py" for name in SUITES]
    environment = {**os.environ, "SERVER_URL": url, "MODEL_FOLDER": model, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, timeout=1800, check=False)
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"] = outcome
    return outcomes


def compare(archive: Path, folder: Path) -> dict[str, Any]:
    model = str(make_tiny_model(cache_folder() / "tiny-qwen2"))
    unpack(archive, folder / "suites")
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    options = PairOptions(model, folder / "pair", kv_buffer_size=2e8, vllm_args=VLLM_ARGS, environment=environment)
    pair = Pair(options)
    try:
        port = find_free_port()
        plain = pair.start_plain(port)
        pair.start_all()
        pair.wait_ready(plain)
        pair.wait_connected()
        direct = run(folder / "suites", f"http://127.0.0.1:{port}", model)
        proxied = run(folder / "suites", pair.proxy_url, model)
    finally:
        pair.stop_all()
    differing = {name: (direct.get(name), proxied.get(name)) for name in {*direct, *proxied}}
    differing = {name: pair_ for name, pair_ in differing.items() if pair_[0] != pair_[1]}
    passed = sorted(name for name, outcome in direct.items() if outcome == "passed")
    failed = sorted(name for name, outcome in direct.items() if outcome == "failed")
    return {
        "tests": len(direct),
        "passed_direct": len(passed),
        "passed_through_proxy": sum(outcome == "passed" for outcome in proxied.values()),
        "failed_both_ways": failed,
        "differing": differing,
    }


@click.command(help=__doc__)
@click.argument("archive", type=click.Path(exists=True, path_type=Path))
def main(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = compare(archive, Path(folder))
    print(json.dumps(result, indent=1))
    raise SystemExit(1 if result["differing"] or not result["passed_direct"] else 0)


if __name__ == "__main__":
    main()
