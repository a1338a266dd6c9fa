"""The `--launch` part of `validate`: finds the vLLM commands in a script, unit or manifest.

`migrate` reads the same kinds of files; its readers are used here, so that both see the same commands.
"""

from __future__ import annotations

from typing import Sequence

from mooncake_v0.config.inputs import make_report
from mooncake_v0.config.launch import Launch, make_launch, server_arguments
from mooncake_v0.config.render import FileReport
from mooncake_v0.errors import ERROR, CouldNotCheckError, Diagnostic


def read_launches(paths: Sequence[str]) -> tuple[list[Launch], list[FileReport]]:
    """The vLLM commands in the files, and a report on each file that could not be read or holds none."""
    launches: list[Launch] = []
    failures: list[FileReport] = []
    for path in paths:
        try:
            found = _read(path)
        except CouldNotCheckError as error:
            failures.append(_failure(path, "file-unreadable", error.what, error.fix))
            continue
        if not found:
            what = "no command that starts vLLM's API server was found"
            fix = "give the script or unit with `vllm serve` or `python -m vllm.entrypoints.openai.api_server` in it"
            failures.append(_failure(path, "launch-not-found", what, fix))
        launches.extend(found)
    return launches, failures


def _read(path: str) -> list[Launch]:
    from mooncake_v0.migrate.files import Files, collect
    from mooncake_v0.migrate.secrets import Secrets

    files, found = collect([path])
    launches = []
    for invocation in Files(files, found, Secrets()).read().invocations:
        arguments = server_arguments(invocation.argv)
        if arguments is not None:
            place = invocation.place
            launches.append(make_launch(arguments, dict(invocation.env), place.file, place.line or 1, invocation.host))
    return launches


def _failure(path: str, rule: str, what: str, fix: str) -> FileReport:
    return make_report(path, [Diagnostic(rule, ERROR, "$", what, fix)], strict=False)
