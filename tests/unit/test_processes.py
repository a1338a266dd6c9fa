"""The processes of a pair on one host, as `demo` and `bench serve` start and stop them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake_v0.pin.processes import Pair, PairOptions, find_free_range


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_amid_a_start_leaves_no_process_behind(
    number: signal.Signals, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(number: int, frame: object) -> None:
        raise SystemExit

    start = subprocess.Popen

    def started_and_interrupted(command: object, **options: Any) -> object:
        made = start([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        signal.raise_signal(number)
        return made

    pair = Pair(PairOptions("model", tmp_path))
    monkeypatch.setattr(subprocess, "Popen", started_and_interrupted)
    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(error):
            pair.start_proxy()
        assert signal.getsignal(signal.SIGTERM) is leave
    finally:
        signal.signal(signal.SIGTERM, before)

    (process,) = pair.processes.values()
    pair.stop_all()
    assert process.popen.returncode == -signal.SIGTERM


def test_each_instance_sees_the_gpus_that_it_was_given(tmp_path: Path) -> None:
    pair = Pair(PairOptions("model", tmp_path, gpus={"prefill": "1,0", "decode": "0"}))
    try:
        made = [pair.start_instance("prefill"), pair.start_instance("decode"), pair.start_plain(1)]
        environments = [psutil.Process(process.pid).environ() for process in made]
    finally:
        pair.stop_all()

    assert [environment.get("CUDA_VISIBLE_DEVICES") for environment in environments] == ["1,0", "0", None]


def test_ports_found_free_are_not_found_again_before_they_can_be_in_use() -> None:
    found = [find_free_range(150) for _ in range(6)]

    assert len({port for base in found for port in range(base, base + 150)}) == 6 * 150
