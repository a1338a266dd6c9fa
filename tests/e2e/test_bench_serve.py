"""`mooncake-v0 bench serve` against the real pair and the real plain instance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_v0.pin.processes import Pair

pytestmark = pytest.mark.pin


def test_bench_serve_measures_both_sides_with_equal_answers(pair: Pair, plain_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mooncake_v0", "bench", "serve", "--proxy", pair.proxy_url, "--plain", plain_url]
    command += [
        "--config",
        str(pair.config_path),
        "--prompt-tokens",
        "64,256",
        "--requests",
        "2",
        "--output-tokens",
        "6",
    ]
    command += ["--rates", "4", "--rate-requests", "4", "--rate-prompt-tokens", "64", "--format", "json"]
    command += ["--pace-prompt-tokens", "256", "--pace-output-tokens", "24", "--html", str(tmp_path / "page.html")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=180)

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    points = report["prompt_sweep"]
    assert [point["prompt_tokens"] for point in points] == [64, 256]
    # fewer may be compared: this vLLM loses tokens of a stream now and then
    assert sum(point["equal_answers"] for point in points) == sum(point["compared_answers"] for point in points) > 0
    assert [side["failed"] for side in (report["rate_sweep"][0]["proxy"], report["rate_sweep"][0]["plain"])] == [0, 0]
    pace = report["pace"]
    assert (pace["prompt_tokens"], pace["streams"], pace["output_tokens"]) == (256, 4, 24)
    assert all(pace[side][phase]["p99"] > 0 for side in ("proxy", "plain") for phase in ("alone", "arrivals"))
    # of each length two requests and two to warm up, four at a rate; two before the streams, twice four, and who arrived
    assert report["transferred"]["hits"] >= 12 + 2 + 8 + pace["proxy"]["prompts"]
    assert all(word in (tmp_path / "page.html").read_text() for word in ("<svg", "Pace of running answers"))
