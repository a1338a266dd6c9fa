"""What both benchmarks share: number lists as options, output files that are checked before a long run, progress."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Callable, Iterator

import click

from mooncake_v0.errors import CouldNotCheckError


class Numbers(click.ParamType):  # type: ignore[type-arg]  # not generic at run time in click 8.1
    """Comma-separated positive numbers, sorted and each once."""

    name = "N,N,…"

    def __init__(self, kind: Callable[[str], float], maximum: float) -> None:
        self._kind = kind
        self._maximum = maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        numbers = set()
        for text in value.split(","):
            try:
                number = self._kind(text.strip())
            except ValueError:
                number = 0
            if not 0 < number <= self._maximum:
                self.fail(f"{text.strip()!r} is not a number above 0 and up to {self._maximum:,}", param, ctx)
            numbers.add(number)
        return tuple(sorted(numbers))


def check_writable(path: Path | None) -> None:
    """Refuse an output file that cannot be written, before the measurement instead of after it."""
    if path is None:
        return
    problem = None
    if path.is_dir():
        problem = "it is a folder"
    elif not path.parent.is_dir():
        problem = f"the folder {path.parent} does not exist"
    else:
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            problem = str(error.strerror)
    if problem:
        raise CouldNotCheckError(f"{path} cannot be written: {problem}", fix="name a file in an existing folder")


def check_plotting(wanted: bool) -> None:
    if wanted and importlib.util.find_spec("matplotlib") is None:
        raise CouldNotCheckError(
            "matplotlib is not installed, and charts are drawn with it",
            fix='pip install "mooncake-v0[bench]", or leave out the options for charts',
        )


def check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CouldNotCheckError(
            "torch is not installed, and the benchmark fills a real KV cache",
            fix="run it in the environment of your vLLM instances",
        )


def write_json(path: Path | None, data: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=2) + "\n")


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """On a terminal a bar with the step's name; elsewhere each new step is a line on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_teller()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def _line_teller() -> Callable[[str, int, int], None]:
    said = ""

    def tell(text: str, done: int, total: int) -> None:
        nonlocal said
        if text != said:
            click.echo(f"[{done}/{total}] {text}", err=True)
        said = text

    return tell


def end_on_sigterm() -> None:
    """So that what was started is stopped."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, interrupt)
