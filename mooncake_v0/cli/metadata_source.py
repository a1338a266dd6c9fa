"""Which store a `metadata` command is about: a URL or a mooncake.json; shared by its modules."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, TypeVar

import click

from mooncake_v0.errors import CouldNotCheckError, StoreUnavailableError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mooncake_v0.metadata.store import MetadataStore

    TextParameter = click.ParamType[str]
else:
    TextParameter = click.ParamType  # click before 8.2 has no type argument


class StoreKey(TextParameter):
    """A key on the command line: text that is UTF-8."""

    name = "key"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("a key is UTF-8 text", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete_key(ctx, incomplete)


KEY = StoreKey()
F = TypeVar("F", bound=Callable[..., Any])

CONFIG_ENV = "MOONCAKE_CONFIG_PATH"
COMPLETION_TIMEOUT_S = 2.0
MAX_COMPLETIONS = 200


def source_argument(function: F) -> F:
    """SOURCE for commands that take nothing else: falls back on $MOONCAKE_CONFIG_PATH."""
    return click.argument("source", envvar=CONFIG_ENV, metavar="[SOURCE]")(function)


def token_option(function: F) -> F:
    return click.option("--token-file", metavar="FILE", help="Token of an http store; a URL may hold a login instead.")(
        function
    )


def format_option(function: F) -> F:
    return click.option(
        "--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output."
    )(function)


@contextmanager
def opened(source: str, token_file: str | None = None) -> Iterator[MetadataStore]:
    """The store of a SOURCE; a store that does not answer becomes exit code 2."""
    from mooncake_v0.metadata.store import open_store

    token = None if token_file is None else _read_token(token_file)
    store = open_store(store_url(source), token=token)
    try:
        yield store
    except StoreUnavailableError as error:
        raise CouldNotCheckError(error.what, fix=error.fix) from error
    finally:
        store.close()


def store_url(source: str) -> str:
    """A store URL as it is, or `metadata_server` of a mooncake.json."""
    if "://" in source or source.startswith("memory:") or not _is_file(source):
        return source
    try:
        config = json.loads(Path(source).read_text(encoding="utf-8-sig"))
        server = config["metadata_server"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise CouldNotCheckError(
            f"{source}: no metadata_server can be read from it: {error}", fix=f"see `mooncake-v0 validate {source}`"
        ) from error
    if not isinstance(server, str):
        raise CouldNotCheckError(f"{source}: metadata_server is not text", fix=f"see `mooncake-v0 validate {source}`")
    return server


def complete_key(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Keys of the store named on the line so far; nothing when it does not answer within COMPLETION_TIMEOUT_S."""
    import threading

    from click.shell_completion import CompletionItem

    source = ctx.params.get("source") or os.environ.get(CONFIG_ENV)
    if not source:
        return []
    found: list[str] = []
    reading = threading.Thread(
        target=_find_keys, args=(source, ctx.params.get("token_file"), incomplete, found), daemon=True
    )
    reading.start()
    reading.join(COMPLETION_TIMEOUT_S)  # a list may take longer than somebody who types will wait
    return [CompletionItem(key) for key in found[:MAX_COMPLETIONS]]


def _find_keys(source: str, token_file: str | None, prefix: str, found: list[str]) -> None:
    from mooncake_v0.errors import MooncakeV0Error

    try:
        # the shell has not expanded ~ yet
        with opened(os.path.expanduser(source), token_file) as store:
            found.extend(entry.key for entry in store.list(prefix) if entry.key.isprintable())
    except MooncakeV0Error:
        return  # a shell's completion has nowhere to show an error


def _is_file(source: str) -> bool:
    if Path(source).is_file():
        return True
    if source.endswith(".json"):
        raise CouldNotCheckError(f"{source}: there is no such file", fix="give a mooncake.json or a store URL")
    return False


def _read_token(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise CouldNotCheckError(f"token file {path!r} could not be read: {error.strerror}", fix="check it") from error
