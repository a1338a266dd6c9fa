"""One small real run: two sides, their agents, the raw engine, real bytes over loopback tcp."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.bench.transfer_report import Limits, Report, Row
from mooncake_v0.cli.bench_transfer import _text
from tests.documents import ROOT, normalised, transcripts

COMMAND = [sys.executable, "-m", "mooncake_v0", "bench", "transfer", "--model", "tiny", "--prompt-tokens"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on standard output, beside the files that were written."""
    folder = tmp_path_factory.mktemp("bench")
    command = [*COMMAND, "100,512", "--rounds", "2", "--format", "json", "--folder", str(folder / "logs")]
    command += ["--json", str(folder / "t.json"), "--png", str(folder / "t.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {"report": json.loads(done.stdout), "stderr": done.stderr, "folder": folder}


def test_each_length_has_a_row_with_whole_blocks(run: dict[str, Any]) -> None:
    rows = run["report"]["rows"]

    assert [(row["prompt_tokens"], row["kv_bytes"]) for row in rows] == [(112, 112 * 2048), (512, 512 * 2048)]
    assert {row["transport"] for row in rows} == {"shm"}  # both sides are on this host


def test_every_rate_fits_its_time(run: dict[str, Any]) -> None:
    rows = run["report"]["rows"] + run["report"]["cache_to_cache"]

    for row in rows:  # both are printed with three decimals, and so each may be off by half of the last one
        slowest, fastest = (row["kv_bytes"] / (row["transfer_ms"] + half) / 1e6 for half in (0.0005, -0.0005))
        assert slowest - 0.0006 <= row["gb_per_s"] <= fastest + 0.0006


def test_the_limits_are_measured_in_the_same_run(run: dict[str, Any]) -> None:
    assert min(run["report"]["limits"].values()) > 0
    assert len(run["report"]["limit_rows"]) == 2


def test_the_guide_shows_what_is_printed(run: dict[str, Any]) -> None:
    report = run["report"]
    rows, whole = (tuple(Row(**row) for row in report[name]) for name in ("rows", "cache_to_cache"))
    notes = tuple(report["notes"])
    printed = _text(Report(Limits(**report["limits"]), rows, whole, (), report["run"], notes)).splitlines()

    (shown,) = (item for item in transcripts(ROOT / "docs" / "operating.md") if item.block.heading == "Measuring")

    assert shown.command == "mooncake-v0 bench transfer --model tiny --prompt-tokens 100,512 --rounds 2"
    assert list(map(normalised, printed)) == list(map(normalised, shown.output))


def test_the_json_file_is_what_was_printed(run: dict[str, Any]) -> None:
    assert json.loads((run["folder"] / "t.json").read_text()) == run["report"]


def test_the_chart_is_a_png(run: dict[str, Any]) -> None:
    assert (run["folder"] / "t.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_progress_is_told_on_standard_error(run: dict[str, Any]) -> None:
    assert "[0/6] 112 tokens: comparing bytes" in run["stderr"]


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    command = [*COMMAND, "512", "--rounds", "100", "--folder", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        assert "comparing bytes" in process.stderr.readline()
        started = _processes_in(tmp_path)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        deadline_s = time.monotonic() + 10
        while _processes_in(tmp_path) and time.monotonic() < deadline_s:
            time.sleep(0.05)
    finally:
        process.kill()
        process.stderr.close()

    assert len(started) == 4  # two sides and their agents
    assert (_processes_in(tmp_path), process.returncode) == (set(), 128 + signal.SIGTERM)


def _processes_in(folder: Path) -> set[str]:
    """Pids of the processes that write their standard error to a file in the folder."""
    found = set()
    for entry in os.scandir("/proc"):
        try:
            target = os.readlink(f"{entry.path}/fd/2")
        except OSError:  # not a process, or one that has just ended
            continue
        if target.startswith(f"{folder}/"):
            found.add(entry.name)
    return found
