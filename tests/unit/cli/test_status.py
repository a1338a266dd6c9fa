"""`status`: what an agent's answer means. A real pair is asked in tests/e2e/test_documented_pair.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_v0.cli.status import _cells, _print, make_row, read_secret
from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.pin.processes import find_free_range
from mooncake_v0.transfer.messages import Status

STATUS = Status("decode", 0, "1a2b3c4d5e6f7081", "ready", "up, 10.0.0.1:13003", "99aa", 50, 200, 3, {})


def test_counters_become_a_share_and_a_speed() -> None:
    counters = {"hits": 3.0, "miss_late": 1.0, "read_bytes": 4e9, "read_us": 2e6}
    row = make_row("decode", 0, "a:1", Status(**{**_fields(STATUS), "counters": counters}))  # type: ignore[arg-type]
    assert (row.hit_rate, row.read_gb_per_s, row.problem) == (0.75, 2.0, "")


def test_a_mapped_buffer_is_named_where_the_speed_of_reads_would_be() -> None:
    row = make_row("decode", 0, "a:1", Status(**{**_fields(STATUS), "transport": "shm"}))  # type: ignore[arg-type]
    assert "mapped" in _cells(row)


def _fields(status: Status) -> dict[str, object]:
    return {name: getattr(status, name) for name in status.__struct_fields__}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"engine": "cannot start as 10.0.0.1:13003"}, "engine: cannot start as 10.0.0.1:13003"),
        ({"peer_epoch": "", "peer": "dtype differs"}, "peer: dtype differs"),
        ({"role": "prefill"}, "prefill rank 0 answers here, not decode rank 0"),
    ],
)
def test_a_rank_that_transfers_nothing_says_why(changes: dict[str, object], problem: str) -> None:
    found = Status(**{**_fields(STATUS), **changes})  # type: ignore[arg-type]
    assert make_row("decode", 0, "a:1", found).problem == problem


def test_a_pair_that_does_not_run_is_exit_code_1_with_a_row_for_each_rank(tmp_path: Path) -> None:
    base = find_free_range(150)
    config = {
        "prefill_url": f"127.0.0.1:{base}",
        "decode_url": f"127.0.0.1:{base + 100}",
        "metadata_server": "etcd://127.0.0.1:1",
    }
    (tmp_path / "mooncake.json").write_text(json.dumps(config))
    command = [
        sys.executable,
        "-m",
        "mooncake_v0",
        "status",
        "mooncake.json",
        "--tp",
        "2",
        "--timeout",
        "0.3",
        "--format",
        "json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    found = json.loads(done.stdout)
    assert (done.returncode, found["healthy"]) == (1, False)
    assert [(row["side"], row["rank"]) for row in found["agents"]] == [
        ("prefill", 0),
        ("prefill", 1),
        ("decode", 0),
        ("decode", 1),
    ]
    assert {row["problem"].split(" at ")[0] for row in found["agents"]} == {"no agent answers"}


def test_a_secret_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CouldNotCheckError, match="cannot be read: No such file"):
        read_secret(str(tmp_path / "nowhere"))
    (tmp_path / "secret").write_text("abc\n")
    assert read_secret(str(tmp_path / "secret")) == b"abc"
    assert read_secret(None) is None


def test_the_last_column_tells_why_prompts_were_missed(capsys: pytest.CaptureFixture[str]) -> None:
    found = Status(**{**_fields(STATUS), "counters": {"hits": 1.0, "miss_late": 2.0}})  # type: ignore[arg-type]
    _print([make_row("decode", 0, "a:1", found)], True)
    assert capsys.readouterr().out.splitlines()[1].endswith("up, 10.0.0.1:13003; missed: late 2")
