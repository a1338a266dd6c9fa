"""The life of an instance as probes and requests see it."""

from __future__ import annotations

import pytest

from mooncake_v0.proxy.pairs import Instance
from mooncake_v0.proxy.settings import Health

HEALTH = Health(eject_failures=5, eject_s=30.0, eject_max_s=70.0)


@pytest.fixture
def up() -> Instance:
    instance = Instance("decode", "http://x", HEALTH)
    instance.probe_ok()
    return instance


def fail(instance: Instance, times: int, now_s: float) -> None:
    for _ in range(times):
        instance.failed(now_s)


def test_instance_is_not_used_before_its_first_good_probe() -> None:
    instance = Instance("decode", "http://x", HEALTH)

    assert not instance.usable(0)
    assert instance.refuses
    assert instance.probe_ok()
    assert instance.usable(0)


def test_refused_probe_takes_it_down_and_two_good_ones_bring_it_back(up: Instance) -> None:
    assert up.probe_failed(refused=True)
    assert up.refuses
    assert not up.probe_ok()
    assert not up.usable(0)
    assert up.probe_ok()
    assert up.usable(0)


def test_one_probe_without_an_answer_is_no_evidence_two_are(up: Instance) -> None:
    assert not up.probe_failed(refused=False)
    assert up.usable(0)
    assert up.probe_failed(refused=False)
    assert not up.usable(0)
    assert not up.refuses
    assert up.probe_ok()
    assert up.usable(0)


def test_five_failures_in_a_row_eject_four_do_not(up: Instance) -> None:
    fail(up, 4, 100)
    up.succeeded(100, 0.1)
    fail(up, 4, 100)
    assert up.usable(100)

    up.failed(100)

    assert not up.usable(100)
    assert up.status(100) == "ejected"


def test_after_an_ejection_one_request_at_a_time_is_tried(up: Instance) -> None:
    fail(up, 5, 100)

    assert not up.usable(129)
    assert up.usable(131)
    assert up.status(131) == "recovering"
    up.inflight = 1
    assert not up.usable(131)


def test_failure_after_an_ejection_ejects_again_for_longer_up_to_a_limit(up: Instance) -> None:
    fail(up, 5, 0)
    up.failed(31)
    assert not up.usable(31 + 59)
    up.failed(100)
    assert up.usable(100 + 71)


def test_two_successes_end_an_ejection(up: Instance) -> None:
    fail(up, 5, 0)
    up.succeeded(31, 0.1)
    assert up.status(31) == "recovering"

    up.succeeded(32, 0.1)

    assert up.status(32) == "up"
    fail(up, 4, 33)
    assert up.usable(33)


def test_new_process_is_not_blamed_for_its_predecessor(up: Instance) -> None:
    fail(up, 5, 0)
    up.refused()
    up.probe_ok()
    up.probe_ok()

    assert up.status(1) == "up"
