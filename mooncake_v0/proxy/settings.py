"""What the proxy can be told, as frozen data. Built by the command line, read by every other module of the proxy."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True)
class PairSpec:
    """One prefill instance and the decode instance that reads its KV; URLs without a trailing slash."""

    name: str
    prefill_url: str
    decode_url: str


@dataclass(frozen=True)
class Timeouts:
    """How long each step may take. There is no limit on the whole: a stream may run for hours.

    connect_s:               TCP (and TLS) connection to an instance
    prefill_s:               a prefill's answer, plus prefill_s_per_1k_tokens for each thousand prompt tokens
    decode_first_byte_s:     first bytes of a streamed answer
    decode_idle_s:           between two pieces of a streamed answer
    decode_json_s:           the whole of an answer that is not streamed; vLLM sends nothing before its end
    client_stall_s:          a client that takes no bytes
    wedge_s:                 no progress with requests in flight before an instance is asked to prove that it lives
    """

    connect_s: float = 5.0
    prefill_s: float = 60.0
    prefill_s_per_1k_tokens: float = 1.0
    decode_first_byte_s: float = 120.0
    decode_idle_s: float = 60.0
    decode_json_s: float = 3600.0
    client_stall_s: float = 300.0
    wedge_s: float = 30.0


@dataclass(frozen=True)
class Limits:
    """How much may be in flight.

    pair_requests:      requests in flight on one pair; a place is taken before prefill starts, until decode ends
    pair_prefills:      prefill legs in flight on one pair
    pair_kv_tokens:     prompt tokens between the start of their prefill and decode's first byte; 0: no limit
    queue_requests:     requests that wait for a place; more are answered 429 at once
    queue_s:            how long one may wait there
    body_bytes:         largest request body
    """

    pair_requests: int = 256
    pair_prefills: int = 64
    pair_kv_tokens: int = 0
    queue_requests: int = 512
    queue_s: float = 30.0
    body_bytes: int = 64 * MIB


@dataclass(frozen=True)
class Health:
    """How instances are watched.

    probe_s, probe_down_s:  pause between two GET /health of an instance that is up, or down
    probe_timeout_s:        one probe
    eject_failures:         consecutive failed requests until an instance is left out
    eject_s, eject_max_s:   how long, times the number of times in a row, at most
    """

    probe_s: float = 1.0
    probe_down_s: float = 0.25
    probe_timeout_s: float = 2.0
    probe_failures: int = 2
    eject_failures: int = 5
    eject_s: float = 30.0
    eject_max_s: float = 300.0


@dataclass(frozen=True)
class ProxySettings:
    """Everything but the pairs.

    require_prefill:     never serve from decode alone for want of a prefill instance
    min_prefill_tokens:  shorter prompts go to decode alone; 0 sends every prompt through prefill
    early_decode:        send decode's leg together with prefill's where a pair can take it
    upstream_key:        sent to the instances in place of the client's Authorization
    retries:             how often a request may be sent again after an instance failed it; 0: never
    cors_origins:        origins that browsers may call from; "*": all; empty: no CORS headers
    drain_delay_s:       after SIGTERM: still serving, but /health says 503 and connections are closed after an answer
    drain_s:             after that: requests in flight may take this long to end
    ca_file:             certificates to check https instances against, in place of the system's
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    health: Health = field(default_factory=Health)
    require_prefill: bool = False
    min_prefill_tokens: int = 0
    early_decode: bool = True
    retries: int = 1
    upstream_key: str = field(default="", repr=False)
    cors_origins: tuple[str, ...] = ()
    ca_file: str = ""
    drain_delay_s: float = 5.0
    drain_s: float = 60.0
