"""All state of one running proxy, and its life: start, pairs coming and going, stop. The applications hold one each.

`start` opens the HTTP clients and starts the watchdog, the housekeeping and two probers a pair; `stop` ends them. Pairs
come from a `Follower` (file, store), from the command line, or from the admin endpoints, at any time in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Coroutine

from mooncake_v0.errors import MooncakeV0Error
from mooncake_v0.proxy import failures
from mooncake_v0.proxy.access_log import AccessLog
from mooncake_v0.proxy.balancer import Balancer
from mooncake_v0.proxy.failures import LegFailed
from mooncake_v0.proxy.guard import SHUTDOWN, Watchdog
from mooncake_v0.proxy.headers import RawHeaders, header
from mooncake_v0.proxy.health import Prober
from mooncake_v0.proxy.job import Services
from mooncake_v0.proxy.keys import Keys, read_key_file
from mooncake_v0.proxy.legs import Upstream
from mooncake_v0.proxy.metrics import Metrics
from mooncake_v0.proxy.pair_source import Follower, PairSource
from mooncake_v0.proxy.pairs import UP, Instance, Pair
from mooncake_v0.proxy.record import Record
from mooncake_v0.proxy.relay import Relay
from mooncake_v0.proxy.settings import PairSpec, ProxySettings

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.25
FOLLOW_FILE_S = 1.0
FOLLOW_STORE_S = 2.0


@dataclass(frozen=True)
class Sources:
    """Where the pairs and the keys come from. key files are read again when they change."""

    pairs: tuple[PairSpec, ...] = ()
    followed: PairSource | None = None
    follow_every_s: float = FOLLOW_FILE_S
    keep_alive_pairs: bool = False
    client_key_file: Path | None = None
    admin_key_file: Path | None = None


class Proxy:
    """One proxy."""

    def __init__(self, settings: ProxySettings, sources: Sources, access_log: AccessLog | None = None) -> None:
        self.settings = settings
        self.sources = sources
        self.balancer = Balancer(settings.limits)
        self.watchdog = Watchdog()
        self.metrics = Metrics(self.balancer)
        self.access_log = access_log or AccessLog(None)
        self.client_keys = Keys()
        self.admin_keys = Keys()
        self.draining = False
        self.started_at = time.time()
        self.upstream: Upstream | None = None
        self.relay: Relay | None = None
        self._log_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="access-log")
        self._tasks: list[asyncio.Task[None]] = []
        self._probers: dict[str, list[asyncio.Task[None]]] = {}
        self._key_files_seen: dict[Path, float] = {}
        self.read_keys()

    # life

    async def start(self) -> None:
        self.upstream = Upstream(self.settings.timeouts, ca_file=self.settings.ca_file)
        services = Services(self.settings, self.balancer, self.upstream, self.leg_failed)
        self.relay = Relay(services, self.watchdog, self.finished, self.response_headers, self.client_keys)
        self._spawn(self.watchdog.run())
        self._spawn(self._keep_house())
        for spec in self.sources.pairs:
            self.add_pair(spec)
        if self.sources.followed is not None:
            follower = self._follower(self.sources.followed)
            await follower.once()
            self._spawn(follower.run(self.sources.follow_every_s))

    async def stop(self) -> None:
        for name in list(self.balancer.pairs):
            self.remove_pair(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.upstream is not None:
            await self.upstream.close()
        self._log_writer.shutdown()
        self.access_log.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(_task(work))

    def _follower(self, source: PairSource) -> Follower:
        return Follower(
            source,
            add=self.add_pair,
            remove=self.remove_pair,
            alive=self._alive,
            counted=lambda result: self.metrics.config_reloads.labels(result).inc(),
            keep_alive_pairs=self.sources.keep_alive_pairs,
        )

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self.access_log.flush(self._log_writer)
            self._read_changed_keys()

    # keys

    def read_keys(self) -> None:
        """Read the key files. Raises MooncakeV0Error for one that cannot be used."""
        for path, keys in self._key_files():
            keys.replace(read_key_file(path))
            self._key_files_seen[path] = path.stat().st_mtime

    def _key_files(self) -> list[tuple[Path, Keys]]:
        files = ((self.sources.client_key_file, self.client_keys), (self.sources.admin_key_file, self.admin_keys))
        return [(path, keys) for path, keys in files if path is not None]

    def _read_changed_keys(self) -> None:
        """Take over changed key files; one that cannot be used leaves the keys as they are."""
        for path, keys in self._key_files():
            try:
                changed_s = path.stat().st_mtime
                if changed_s != self._key_files_seen[path]:
                    self._key_files_seen[path] = changed_s
                    keys.replace(read_key_file(path))
                    logger.info("keys of %s taken over", path)
            except (OSError, MooncakeV0Error) as error:
                logger.error("keys stay as they are: %s", error)

    # pairs

    def add_pair(self, spec: PairSpec) -> None:
        assert self.upstream is not None
        pair = Pair(spec, self.settings.limits, self.settings.health)
        probers = [
            Prober(
                instance,
                pair,
                self.upstream,
                self.settings.upstream_key,
                self.instance_changed,
                early_decode=self.settings.early_decode,
            )
            for instance in pair.instances
        ]
        self._probers[spec.name] = [_task(prober.run()) for prober in probers]
        self.balancer.add(pair)

    def remove_pair(self, name: str) -> bool:
        """Give a pair no more requests and forget it; those in flight on it end as they would."""
        for task in self._probers.pop(name, []):
            task.cancel()
        return self.balancer.remove(name) is not None

    def _alive(self, name: str) -> bool:
        pair = self.balancer.pairs.get(name)
        return pair is not None and all(instance.state == UP for instance in pair.instances)

    def instance_changed(self, instance: Instance) -> None:
        """An instance came up, went down or got stuck: let those who wait for it know."""
        if instance.state == UP and not instance.wedged:
            self.balancer.wake()
        elif self._another_can_serve(instance):
            instance.release_movable()

    def _another_can_serve(self, lost: Instance) -> bool:
        now_s = time.monotonic()
        others = (pair for pair in self.balancer.pairs.values() if lost not in pair.instances and not pair.draining)
        return any(pair.decode.usable(now_s) for pair in others)

    # what the relay reports and asks

    @property
    def ready(self) -> bool:
        """Whether a request that comes now can be served."""
        pairs = self.balancer.pairs.values()
        need_prefill = self.settings.require_prefill
        return not self.draining and any(
            not pair.draining and not pair.decode.refuses and not (need_prefill and pair.prefill.refuses)
            for pair in pairs
        )

    def leg_failed(self, pair: str, failure: LegFailed) -> None:
        self.metrics.leg_failures.labels(pair, failure.instance.role, failure.kind).inc()
        failures.blame(failure, time.monotonic())

    def finished(self, record: Record) -> None:
        self.metrics.observe(record)
        self.access_log.write(record)

    def response_headers(self, headers: RawHeaders) -> RawHeaders:
        """Headers that every response to this request carries."""
        extra: RawHeaders = [(b"connection", b"close")] if self.draining else []
        if self.settings.cors_origins:
            origin = header(headers, b"origin").decode("latin-1")
            if origin and ("*" in self.settings.cors_origins or origin in self.settings.cors_origins):
                extra += [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]
        return extra

    # the end

    def cut_all(self) -> int:
        """End every request in flight with the error that says that the proxy shuts down; returns how many."""
        guards = list(self.watchdog.guards)
        for guard in guards:
            guard.cut(SHUTDOWN)
        return len(guards)


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task of the proxy's life, whose unexpected end is logged instead of staying unnoticed until the very end."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_log_if_failed)
    return task


def _log_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("a background task failed", exc_info=task.exception())
