"""Who uses a pool, and who waits for them."""

from __future__ import annotations

import threading

from mooncake_v0.transfer.in_use import InUse

WAIT_S = 20.0


def test_supervisor_waits_for_every_user_and_keeps_newcomers_out() -> None:
    in_use, alone, done, entered = InUse(), threading.Event(), threading.Event(), threading.Event()

    def supervise() -> None:
        with in_use.by_nobody():
            alone.set()
            done.wait(WAIT_S)

    def come_late() -> None:
        alone.wait(WAIT_S)
        in_use.enter()
        entered.set()

    in_use.enter()
    threads = [threading.Thread(target=supervise), threading.Thread(target=come_late)]
    for thread in threads:
        thread.start()
    in_use.enter_again()  # for a copy that outlasts the step
    in_use.leave()
    assert not alone.wait(0.05)

    in_use.leave()

    assert alone.wait(WAIT_S) and not entered.wait(0.05)
    done.set()
    assert entered.wait(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)


def test_user_who_stays_does_not_wait_for_one_who_waits_for_him() -> None:
    in_use, alone = InUse(), threading.Event()

    def supervise() -> None:
        with in_use.by_nobody():
            alone.set()

    in_use.enter()
    thread = threading.Thread(target=supervise)
    thread.start()
    while not in_use._state:
        pass

    in_use.enter_again()
    in_use.leave()
    in_use.leave()

    assert alone.wait(WAIT_S)
    thread.join(WAIT_S)


def test_a_use_that_never_ends_keeps_newcomers_out_for_a_moment_only() -> None:
    in_use, alone, entered = InUse(closed_s=0.05, open_s=0.05), threading.Event(), threading.Event()

    def supervise() -> None:
        with in_use.by_nobody():
            alone.set()

    def come_late() -> None:
        in_use.enter()
        in_use.leave()
        entered.set()

    in_use.enter()
    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    while not in_use._state:
        pass
    late = threading.Thread(target=come_late)
    late.start()

    assert entered.wait(WAIT_S) and not alone.is_set()

    in_use.leave()

    assert alone.wait(WAIT_S)
    for thread in (supervisor, late):
        thread.join(WAIT_S)


def test_a_long_step_is_waited_for_and_the_next_one_comes_after() -> None:
    in_use, alone = InUse(closed_s=WAIT_S), threading.Event()

    def supervise() -> None:
        with in_use.by_nobody():
            alone.set()

    in_use.enter()
    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    assert not alone.wait(0.3)

    in_use.leave()
    in_use.enter()

    assert alone.wait(WAIT_S)
    supervisor.join(WAIT_S)
