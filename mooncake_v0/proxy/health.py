"""Watches the instances: one task for each, from when its pair is added until it is removed.

Every second: GET /health. When an instance comes up, and every half minute: GET /v1/models for its model names and
context length, and GET /metrics to learn whether decode may be sent requests early. When requests are in flight and nothing
has come out for long, a request of one token asks it to prove that it lives: vLLM's /health answers 200 as long as the
process lives, also when the engine is stuck.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any

import aiohttp
from yarl import URL

from mooncake_v0.handoff import GAUGE
from mooncake_v0.proxy.legs import EXCHANGE_ERRORS, Upstream
from mooncake_v0.proxy.pairs import UP, Instance, Pair
from mooncake_v0.proxy.settings import Timeouts

logger = logging.getLogger(__name__)

MODELS_EVERY_S = 30.0
METRICS_AFTER_S = 2.0  # from when an instance of the pair came up: its agent may still look for its peer
AGENTS = re.compile(rb"^%s\{([^}]*)\} 1(?:\.0)?$" % GAUGE.encode(), re.MULTILINE)
LABEL = re.compile(rb'(\w+)="([0-9a-f]+)"')
PROOF_TIMEOUT_S = 10.0
PROOF_READ_BYTES = 65536


class Prober:
    """Watches one instance of one pair. `changed` is called, with the instance, whenever its usability changed."""

    def __init__(
        self, instance: Instance, pair: Pair, upstream: Upstream, key: str, changed: Any, *, early_decode: bool
    ) -> None:
        self.instance = instance
        self.pair = pair
        self.health = instance.health
        self.session = upstream.probes
        self.timeouts: Timeouts = upstream.timeouts
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.changed = changed
        self.models_known_s = 0.0
        self.early_decode = early_decode
        self.metrics_read_s = 0.0

    async def run(self) -> None:
        while True:
            await self.once()
            content = self.instance.state == UP and self.instance.probe_failures == 0
            await asyncio.sleep(self.health.probe_s if content else self.health.probe_down_s)

    async def once(self) -> None:
        """One probe, and what follows from it."""
        instance = self.instance
        try:
            status, _ = await self._get("/health", self.health.probe_timeout_s)
            healthy, refused = status == 200, False
        except aiohttp.ClientConnectorError:
            healthy, refused = False, True
        except EXCHANGE_ERRORS:
            healthy, refused = False, False
        if not healthy:
            if instance.probe_failed(refused=refused):
                logger.warning("%s instance of pair %s is %s", instance.role, self.pair.name, instance.state)
                self.changed(instance)
            return
        if instance.probe_ok():
            logger.info("%s instance of pair %s is up", instance.role, self.pair.name)
            self.models_known_s = self.metrics_read_s = 0.0
            for one in self.pair.instances:
                one.metrics_after_s = METRICS_AFTER_S
            await self._learn_models()
            self.changed(instance)
        elif time.monotonic() - self.models_known_s > MODELS_EVERY_S:
            await self._learn_models()
        if self.early_decode and time.monotonic() - self.metrics_read_s > instance.metrics_after_s:
            await self._learn_agents()
        await self._demand_proof()

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.timeouts.connect_s)
        url = URL(self.instance.url + path, encoded=True)
        async with self.session.get(url, headers=self.headers, timeout=timeout, allow_redirects=False) as response:
            return response.status, await response.read()

    async def _learn_models(self) -> None:
        """Read model names and context length; an instance that wants a key we lack keeps them to itself."""
        try:
            status, body = await self._get("/v1/models", self.health.probe_timeout_s)
            cards = json.loads(body)["data"] if status == 200 else []
            self.instance.models = tuple(str(card["id"]) for card in cards)
            self.instance.max_model_len = min(
                (int(c["max_model_len"]) for c in cards if c.get("max_model_len")), default=0
            )
            self.models_known_s = time.monotonic()
            self._compare()
        except (*EXCHANGE_ERRORS, KeyError, TypeError, AttributeError):
            # tried again in a second; the checks that need it do without
            return

    async def _learn_agents(self) -> None:
        """Read whose peer the instance's transfer agent is, soon after a start and then ever more seldom."""
        self.metrics_read_s = time.monotonic()
        self.instance.metrics_after_s = min(2 * self.instance.metrics_after_s, MODELS_EVERY_S)
        before = self.pair.hands_off_early
        try:
            status, body = await self._get("/metrics", self.health.probe_timeout_s)
        except EXCHANGE_ERRORS:
            return
        found = AGENTS.search(body) if status == 200 else None
        labels = dict(LABEL.findall(found[1])) if found is not None else {}
        try:
            self.instance.agents = labels[b"epoch"].decode(), labels[b"peer_epoch"].decode()
        except KeyError:
            self.instance.agents = None
        if self.pair.hands_off_early and not before:
            logger.info("decode of pair %s takes requests together with prefill", self.pair.name)

    def _compare(self) -> None:
        """Say so when the two instances of a pair do not serve the same: KV of one model is of no use to another."""
        known = [(sorted(one.models), one.max_model_len) for one in self.pair.instances if one.models]
        differs = len(known) == 2 and known[0] != known[1]
        if differs and not self.pair.differs:
            logger.warning("prefill and decode of pair %s serve %s and %s", self.pair.name, *known)
        self.pair.differs = differs

    async def _demand_proof(self) -> None:
        """If nothing has come out for too long, or the instance is known to be wedged, ask for one token."""
        instance = self.instance
        silent_s = time.monotonic() - instance.last_progress_s
        if not instance.wedged and (instance.inflight == 0 or silent_s < self._patience_s()):
            return
        if await self._one_token():
            instance.last_progress_s = time.monotonic()
            if instance.wedged:
                instance.wedged = False
                logger.info("%s instance of pair %s works again", instance.role, self.pair.name)
                self.changed(instance)
        elif not instance.wedged and instance.state == UP:
            instance.wedged = True
            logger.error(
                "%s instance of pair %s is wedged: healthy, but nothing came out for %.0f s",
                instance.role,
                self.pair.name,
                silent_s + PROOF_TIMEOUT_S,
            )
            self.changed(instance)

    def _patience_s(self) -> float:
        """The configured time, or five times the slowest of recent answers where that is more."""
        slowest_s = max(self.instance.latencies_s, default=0.0)
        return max(self.timeouts.wedge_s, 5 * slowest_s)

    async def _one_token(self) -> bool:
        body = {"model": self.instance.models[0] if self.instance.models else "", "prompt": [0], "max_tokens": 1}
        timeout = aiohttp.ClientTimeout(
            total=min(PROOF_TIMEOUT_S, self.timeouts.wedge_s), sock_connect=self.timeouts.connect_s
        )
        url = URL(self.instance.url + "/v1/completions", encoded=True)
        try:
            async with self.session.post(url, json=body, headers=self.headers, timeout=timeout) as response:
                await response.content.read(PROOF_READ_BYTES)
                # a refusal is an answer of the API server, not of the engine
                return response.status == 200 or response.status in (401, 403, 404)
        except EXCHANGE_ERRORS:
            return False
