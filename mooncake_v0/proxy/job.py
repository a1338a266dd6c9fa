"""One request as the parts of the hot path hand it on, and what all of them need. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from mooncake_v0.proxy.balancer import Balancer
from mooncake_v0.proxy.client_side import ClientSide
from mooncake_v0.proxy.failures import LegFailed
from mooncake_v0.proxy.guard import Guard
from mooncake_v0.proxy.legs import Upstream
from mooncake_v0.proxy.prefill_request import RequestPlan
from mooncake_v0.proxy.record import Record
from mooncake_v0.proxy.settings import ProxySettings


@dataclass(frozen=True)
class Services:
    """What every request needs; lives as long as the app."""

    settings: ProxySettings
    balancer: Balancer
    upstream: Upstream
    leg_failed: Callable[[str, LegFailed], None]  # pair's name, failure: counts it against whom it is due


@dataclass(frozen=True)
class Job:
    """One request, read and planned. target: path and query as the client wrote them."""

    client: ClientSide
    guard: Guard
    record: Record
    plan: RequestPlan
    path: str
    target: str
    body: bytes
    headers: list[tuple[str, str]]
