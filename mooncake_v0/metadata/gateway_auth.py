"""Who may use a gateway: a token, users with passwords, or everybody. Comparison takes the same time for every guess.

The pinned engine can only send HTTP Basic (libcurl takes it from `http://user:password@host`; engine.md facts, ran with
0.3.3.post2), so the token is accepted as the password of any user name as well as `Authorization: Bearer`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_v0.errors import MetadataError


@dataclass(frozen=True)
class Access:
    """SHA-256 digests of what is accepted; empty means that everybody may read and write."""

    token: bytes | None = field(default=None, repr=False)
    logins: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def is_open(self) -> bool:
        return self.token is None and not self.logins

    def allows(self, authorization: str | None) -> bool:
        """Whether an Authorization header may pass; None is no header."""
        if self.is_open:
            return True
        scheme, _, credentials = (authorization or "").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_token(credentials.strip())
        if scheme.lower() != "basic":
            return False
        try:
            login = base64.b64decode(credentials, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return False
        # every comparison runs, so that the time does not tell which one failed
        known = [hmac.compare_digest(_digest(login), digest) for digest in self.logins]
        return any([*known, self._is_token(login.partition(":")[2])])

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(_digest(text), self.token or b"\0" * 32)


def token_access(token: str) -> Access:
    return Access(token=_digest(token))


def read_access(token_file: str | None, basic_file: str | None) -> Access:
    """Access from a file with one token and a file of `user:password` lines (# comments). Raises MetadataError."""
    token = None
    if token_file is not None:
        text = _read(token_file).strip()
        if not text or "\n" in text:
            raise MetadataError(f"token file {token_file!r} does not hold one token", fix="write one line into it")
        token = _digest(text)
    logins: list[bytes] = []
    for number, line in enumerate(_read(basic_file).splitlines() if basic_file is not None else (), 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, separator, password = line.strip().partition(":")
        if not (user and separator and password):
            raise MetadataError(f"{basic_file}:{number} is not user:password", fix="write one user:password a line")
        logins.append(_digest(f"{user}:{password}"))
    if basic_file is not None and not logins:
        raise MetadataError(f"{basic_file!r} names no user", fix="write one user:password a line")
    return Access(token, tuple(logins))


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise MetadataError(f"{path!r} could not be read: {reason}", fix="check the path and permissions") from error


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
