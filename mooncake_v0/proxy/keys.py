"""API keys of clients and of administrators. Keys are kept as digests only and never written anywhere."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Iterable

from mooncake_v0.errors import CouldNotCheckError, ProxyError
from mooncake_v0.proxy.api_errors import ApiError, invalid_request


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Keys:
    """A set of accepted bearer keys; an empty set accepts everybody."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accepts(self, authorization: bytes) -> bool:
        """Whether an Authorization header carries one of the keys; takes the same time for every wrong key."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(found)

    def check(self, authorization: bytes) -> None:
        """Raises ApiError 401 for a missing or wrong key."""
        if not self.accepts(authorization):
            raise unauthorized()


def unauthorized() -> ApiError:
    return invalid_request(401, "missing or wrong API key; send it as `Authorization: Bearer KEY`", "invalid_api_key")


def read_key_file(path: Path) -> tuple[str, ...]:
    """Keys of a file, one a line; blank lines and lines that begin with # are left out.

    Raises CouldNotCheckError when it cannot be read, ProxyError when it holds no key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CouldNotCheckError(
            f"cannot read the key file {str(path)!r}: {error}", fix="check its path and mode"
        ) from error
    lines = [line.strip() for line in text.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ProxyError(f"the key file {str(path)!r} holds no key", fix="write one key a line")
    return keys
