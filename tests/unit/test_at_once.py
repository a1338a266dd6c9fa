"""Asking many at once: the order of the answers, their number of threads, failures."""

from __future__ import annotations

import threading

import pytest

from mooncake_v0.at_once import at_once


def test_answers_come_in_the_order_of_the_questions_whoever_is_first() -> None:
    second_is_done = threading.Event()

    def answer(number: int) -> int:
        if number == 1:
            assert second_is_done.wait(60)
        else:
            second_is_done.set()
        return number * 10

    assert at_once(answer, [1, 2]) == [10, 20]


def test_more_questions_than_threads_are_all_answered() -> None:
    assert at_once(str, range(100), most=3) == [str(number) for number in range(100)]


def test_no_question_has_no_answer() -> None:
    assert at_once(str, []) == []


def test_a_failure_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        at_once(lambda number: 1 // number, [1, 0, 2])
