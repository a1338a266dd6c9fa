"""Where the pairs come from: given once, a file that is read again when it changes, or a metadata store.

A `PairSource` answers with the whole set each time it is asked; `Follower` compares it with what it saw before and
adds and removes pairs. It acts on changes of the source only, so that what an administrator does by hand stays done.
A source that cannot be read changes nothing: the pairs stay as they are, and the failure is logged once and counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Protocol, Sequence
from urllib.parse import urlsplit

from mooncake_v0.errors import CouldNotCheckError, MooncakeV0Error, ProxyError
from mooncake_v0.metadata.registry import InstanceRecord, list_instances
from mooncake_v0.metadata.store import MetadataStore
from mooncake_v0.proxy.settings import PairSpec

try:
    import tomllib
except ImportError:  # Python 3.9 and 3.10
    import tomli as tomllib  # type: ignore[no-redef]

logger = logging.getLogger(__name__)

EXAMPLE = '[[pairs]] name = "a" prefill = "http://HOST:PORT" decode = "http://HOST:PORT"'


def check_url(url: str, where: str) -> str:
    """A base URL of an instance without its trailing slash. Raises ProxyError for anything else."""
    fix = "write it as http://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ProxyError(f"{where}: {url!r} is not a URL: {error}", fix=fix) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProxyError(f"{where}: {url!r} is not an http or https URL", fix=fix)
    if parts.username or parts.query or parts.fragment:
        raise ProxyError(f"{where}: {url!r} has more than a host, a port and a path", fix=fix)
    if port == 0:
        raise ProxyError(f"{where}: {url!r} has port 0", fix=fix)
    return url.rstrip("/")


def check_pairs(pairs: Sequence[PairSpec]) -> tuple[PairSpec, ...]:
    """Pairs with checked URLs and distinct names. Raises ProxyError."""
    checked: list[PairSpec] = []
    for pair in pairs:
        if not pair.name or any(pair.name == other.name for other in checked):
            raise ProxyError(f"pair name {pair.name!r} is empty or used twice", fix="give every pair its own name")
        prefill = check_url(pair.prefill_url, f"pair {pair.name!r}, prefill")
        decode = check_url(pair.decode_url, f"pair {pair.name!r}, decode")
        if prefill == decode:
            raise ProxyError(
                f"pair {pair.name!r} has {prefill!r} for both prefill and decode",
                fix="a pair is a kv_producer and a kv_consumer; give the URL of each",
            )
        checked.append(replace(pair, prefill_url=prefill, decode_url=decode))
    return tuple(checked)


class PairSource(Protocol):
    """Something that knows the pairs. `read` may block; it raises MooncakeV0Error when it cannot tell."""

    def read(self) -> tuple[PairSpec, ...]: ...


class FileSource:
    """A TOML or JSON file with a list `pairs` of tables `name`, `prefill`, `decode`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[PairSpec, ...]:
        try:
            content = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CouldNotCheckError(
                f"cannot read the pair file {str(self.path)!r}: {error}", fix="check its path and mode"
            ) from error
        try:
            value = json.loads(content) if self.path.suffix == ".json" else tomllib.loads(content)
        except ValueError as error:
            raise ProxyError(f"{self.path}: {error}", fix=f"write it as {EXAMPLE}") from error
        return check_pairs([self._pair(row, i) for i, row in enumerate(self._rows(value))])

    def _rows(self, value: Any) -> list[Any]:
        rows = value.get("pairs") if isinstance(value, dict) else None
        if not isinstance(rows, list) or not rows:
            raise ProxyError(f"{self.path}: $.pairs is not a list of pairs", fix=f"write it as {EXAMPLE}")
        return rows

    def _pair(self, row: Any, index: int) -> PairSpec:
        where = f"{self.path}: $.pairs[{index}]"
        if not isinstance(row, dict):
            raise ProxyError(f"{where} is not a table", fix=f"write it as {EXAMPLE}")
        unknown = sorted(set(row) - {"name", "prefill", "decode"})
        if unknown:
            raise ProxyError(f"{where} has an unknown key {unknown[0]!r}", fix="the keys are name, prefill and decode")
        row = {"name": f"pair-{index}", **row}
        for key in ("name", "prefill", "decode"):
            if not isinstance(row.get(key), str):
                raise ProxyError(f"{where}.{key} is missing or not a string", fix=f"write it as {EXAMPLE}")
        return PairSpec(row["name"], row["prefill"], row["decode"])


class StoreSource:
    """Instances that registered themselves in a metadata store; those of one mooncake.json are a pair.

    Used: the record of rank 0 that is fresh and names the API address of its vLLM server. The pair is named after the
    digest of the configuration that both sides share, so that it keeps its name when an instance restarts.
    """

    def __init__(self, open_it: Callable[[], MetadataStore]) -> None:
        self._open = open_it
        self._store: MetadataStore | None = None

    def read(self) -> tuple[PairSpec, ...]:
        try:
            if self._store is None:
                self._store = self._open()
            records = list_instances(self._store)
        except MooncakeV0Error:
            # opened anew next time: a connection that broke may stay broken
            self.close()
            raise
        return pairs_of(records)

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def pairs_of(records: Sequence[InstanceRecord], now: float | None = None) -> tuple[PairSpec, ...]:
    """The pairs among registered instances; of two with one role and configuration, the one refreshed last."""
    found: dict[tuple[str, str], InstanceRecord] = {}
    for record in sorted(records, key=lambda record: record.refreshed_at):
        if record.rank == 0 and record.api_url and record.is_fresh(now):
            found[record.deployment, record.role] = record
    pairs: list[PairSpec] = []
    for deployment in sorted({deployment for deployment, _ in found}):
        prefill, decode = found.get((deployment, "prefill")), found.get((deployment, "decode"))
        if prefill is None or decode is None:
            continue
        pair = PairSpec(deployment[:12] or "default", prefill.api_url or "", decode.api_url or "")
        try:
            pairs = [*check_pairs([*pairs, pair])]
        except ProxyError as error:
            # one record that is wrong must not hide the others
            logger.error("registered pair left out: %s", error)
    return tuple(pairs)


class Follower:
    """Keeps a proxy's pairs in step with a source.

    add, remove:  called for each change
    alive:        whether a pair still answers; a pair whose record has gone stays while it does, because a store that
                  lost its memory must not take the instances with it
    counted:      told "changed", "same" or "failed" after each reading
    """

    def __init__(
        self,
        source: PairSource,
        *,
        add: Callable[[PairSpec], None],
        remove: Callable[[str], object],
        alive: Callable[[str], bool],
        counted: Callable[[str], None],
        keep_alive_pairs: bool,
    ) -> None:
        self.source = source
        self.add = add
        self.remove = remove
        self.alive = alive
        self.counted = counted
        self.keep_alive_pairs = keep_alive_pairs
        self.known: dict[str, PairSpec] = {}
        self.failing = ""

    async def run(self, every_s: float) -> None:
        while True:
            await self.once()
            await asyncio.sleep(every_s)

    async def once(self) -> None:
        """Read the source and act on what changed since the last reading."""
        try:
            pairs = await asyncio.get_running_loop().run_in_executor(None, self.source.read)
        except MooncakeV0Error as error:
            if self.failing != error.what:
                logger.error("pairs stay as they are: %s", error)
            self.failing = error.what
            self.counted("failed")
            return
        if self.failing:
            logger.info("the pair source can be read again")
        self.failing = ""
        self.counted("changed" if self.apply(pairs) else "same")

    def apply(self, pairs: Sequence[PairSpec]) -> bool:
        """Add, replace and remove; True when anything changed."""
        wanted = {pair.name: pair for pair in pairs}
        changed = False
        for name in [name for name in self.known if name not in wanted]:
            if self.keep_alive_pairs and self.alive(name):
                continue
            logger.info("pair %s is gone from the source", name)
            del self.known[name]
            self.remove(name)
            changed = True
        for name, pair in wanted.items():
            if self.known.get(name) != pair:
                if name in self.known:
                    self.remove(name)
                logger.info("pair %s comes from the source", name)
                self.known[name] = pair
                self.add(pair)
                changed = True
        return changed
