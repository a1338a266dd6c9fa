"""What can be wrong, as data and as exceptions. Imports nothing of ours.

Findings about a user's file are `Diagnostic` values: collected, never raised. Failures at run time are exceptions:

    MooncakeV0Error
    ├── CouldNotCheckError      a file could not be read, a host not asked: exit code 2, not 1
    ├── ConfigError             a config that must be valid is not; carries the diagnostics
    ├── UnsupportedError        a feature, flag or version that this package refuses, with the reason
    ├── MetadataError           the metadata store or gateway
    │   └── StoreUnavailableError   the store does not answer; may work later
    ├── TransferError           engine, agent, pool, side channel
    │   ├── EngineError         a read from an engine failed, or one published something else than configured
    │   ├── AgentUnavailableError   the transfer agent died or did not answer in time
    │   └── ProtocolError       a peer sent something that is not a message of ours
    ├── KVLayoutError           a KV cache whose shape, dtype or device is not what was declared
    └── ProxyError              the proxy's own configuration

Every exception says what (a fact, lower case, with the value) and how to fix it. The command line prints both, without
a traceback.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Sequence

ERROR = "error"
WARNING = "warning"
INFO = "info"


def printable(text: str) -> str:
    """The text with escapes for what cannot be printed: line breaks, terminal codes, halves of surrogate pairs."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


@dataclass(frozen=True)
class Diagnostic:
    """One finding about a file or a host.

    rule:      kebab-case name; `mooncake-v0 explain RULE` prints what it is about
    severity:  "error", "warning" or "info"
    where:     JSON path ("$.prefill_url"), flag ("--kv-transfer-config.kv_rank") or host and port
    what:      a fact with the value, lower case, no full stop; what cannot be printed of the value is escaped
    fix:       an action
    line, column: 1-based position in the file, where known
    """

    rule: str
    severity: str
    where: str
    what: str
    fix: str
    line: int | None = None
    column: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", printable(self.what))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class MooncakeV0Error(Exception):
    """Base of everything this package raises on purpose."""

    def __init__(self, what: str, *, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}; fix: {self.fix}" if self.fix else self.what


class CouldNotCheckError(MooncakeV0Error):
    """Something needed for the check could not be read or reached."""


class ConfigError(MooncakeV0Error):
    """A configuration that must be valid is not."""

    def __init__(self, what: str, *, fix: str = "", diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(what, fix=fix)
        self.diagnostics = tuple(diagnostics)


class UnsupportedError(MooncakeV0Error):
    """A feature, flag or version that this package refuses."""


class MetadataError(MooncakeV0Error):
    """The metadata store or gateway failed."""


class StoreUnavailableError(MetadataError):
    """The metadata store does not answer; it may do so later."""


class TransferError(MooncakeV0Error):
    """Engine, agent, pool or side channel failed."""


class EngineError(TransferError):
    """A read from a transfer engine failed, or one did not start or published something else than configured."""


class AgentUnavailableError(TransferError):
    """The transfer agent died or did not answer before its deadline."""


class ProtocolError(TransferError):
    """A peer sent something that is not a valid message."""


class KVLayoutError(MooncakeV0Error):
    """A KV cache does not have the declared shape, dtype or device."""


class ProxyError(MooncakeV0Error):
    """The proxy cannot be configured or started as asked."""
