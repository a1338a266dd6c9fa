"""Three minutes of the chaos soak (tests.soak.chaos), which runs longer by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pin

CHAOS_S = 180
OPTIONS = ("--seed", "7", "--clients", "8", "--prompts", "50", "--fresh", "20", "--instance-kills", "1")


@pytest.mark.timeout(1200)
def test_pair_answers_like_one_instance_while_everything_around_it_fails(tmp_path: Path) -> None:
    """On loopback, without faults of the network, where namespaces are not permitted; the report says so."""
    report = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.soak.chaos", "--seconds", str(CHAOS_S), *OPTIONS]
    command += ["--folder", str(tmp_path / "logs"), "--json", str(report)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=1150)

    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    result: dict[str, Any] = json.loads(report.read_text())
    assert result["problems"] == []
    assert result["requests"]["equal"] > 0
    assert len(result["faults"]) > 5
    assert result["hit_rate"] > 0.95
    assert result["isolated"] or "no namespaces" in done.stderr
