"""Ask many at once, and still end on Ctrl-C: the pools of concurrent.futures wait for their threads, even at exit."""

from __future__ import annotations

import threading
from typing import Callable, Iterable, TypeVar

LOOK_S = 0.2

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def at_once(function: Callable[[Item], Answer], items: Iterable[Item], most: int = 32) -> list[Answer]:
    """The function's answers in the order of the items, asked in up to `most` threads; the first exception is raised.

    KeyboardInterrupt leaves the threads behind: they are daemons, and end with the process.
    """
    wanted = list(items)
    answers: dict[int, Answer] = {}
    failures: list[BaseException] = []
    left, lock = iter(enumerate(wanted)), threading.Lock()

    def work() -> None:
        while not failures:
            with lock:
                number, item = next(left, (None, None))
            if number is None:
                return
            try:
                answers[number] = function(item)  # type: ignore[arg-type]
            except BaseException as error:  # raised again by the caller's thread
                failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(wanted)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(LOOK_S)  # a signal that comes just before a wait is seen only after it
    if failures:
        raise failures[0]
    return [answers[number] for number in range(len(wanted))]
