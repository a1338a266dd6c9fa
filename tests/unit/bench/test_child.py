"""The talk with a real process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.bench.child import Child
from mooncake_v0.errors import CouldNotCheckError

SOURCE = """
import os, sys, time
from mooncake_v0.bench.child import Parent
from mooncake_v0.errors import TransferError

def fail():
    raise TransferError("no such peer", fix="start it")

def die():
    print("last words", flush=True)
    os._exit(3)

parent = Parent(int(sys.argv[1]))

def slow():
    parent.say("begun")
    time.sleep(30)

parent.serve({"add": lambda a, b: a + b, "fail": fail, "die": die, "slow": slow})
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    started = Child("helper", [sys.executable, "-c", SOURCE], tmp_path / "helper.log", {})
    yield started
    started.kill()


def test_a_child_answers(child: Child) -> None:
    assert child.ask("add", a=2, b=3) == 5


def test_a_childs_failure_keeps_what_and_fix(child: Child) -> None:
    with pytest.raises(CouldNotCheckError, match="helper: no such peer; fix: start it"):
        child.ask("fail")


def test_a_dead_child_is_reported_with_its_exit_code_and_log(child: Child) -> None:
    with pytest.raises(CouldNotCheckError, match=r"helper has ended \(exit code 3\)(.|\n)*last words"):
        child.ask("die")


def test_a_late_child_is_given_up_at_the_deadline(child: Child) -> None:
    child.tell("slow")
    child.wait_event("begun")

    with pytest.raises(CouldNotCheckError, match="gave no answer within 0 s"):
        child.result(timeout_s=0.2)


def test_a_child_ends_when_its_parent_hangs_up(child: Child) -> None:
    child.ask("add", a=1, b=1)

    child.stop()

    assert child.exit_code == 0
