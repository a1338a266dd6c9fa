"""Store URLs: what they may say, as data, and with their secrets masked.

    memory:
    sqlite:///relative/file.db    sqlite:////absolute/file.db
    redis://[[USER]:PASSWORD@]HOST[:6379][/DB]           rediss:// for TLS
    redis+sentinel://[…@]HOST[:26379],HOST…/SERVICE[/DB]  rediss+sentinel://
    redis+cluster://[…@]HOST[:6379],HOST…                rediss+cluster://
    etcd://[USER:PASSWORD@]HOST[:2379],HOST…             etcds:// for TLS; bare HOST:PORT[,HOST:PORT] means etcd
    http://[USER:PASSWORD@]HOST[:PORT]/metadata          https://

Options after `?`: ca=FILE, cert=FILE, key=FILE (TLS), password_file=FILE (keeps the password out of the process list);
for sentinels that have a login of their own, sentinel_user=NAME and sentinel_password_file=FILE.
User and password are percent-decoded. Called by `open_store`, the gateway and the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from mooncake_v0.errors import MetadataError
from mooncake_v0.url_parts import URLParts, is_host, is_ipv6, split_url, unencoded_in_password

DEFAULT_PORTS = {"redis": 6379, "redis+sentinel": 26379, "redis+cluster": 6379, "etcd": 2379, "http": 80, "https": 443}
TLS_KINDS = {"rediss": "redis", "rediss+sentinel": "redis+sentinel", "rediss+cluster": "redis+cluster", "etcds": "etcd"}
SENTINEL_OPTIONS = ("sentinel_user", "sentinel_password_file")
OPTIONS = ("ca", "cert", "key", "password_file", *SENTINEL_OPTIONS)
FORMS = "memory:, sqlite:///FILE, redis://HOST:PORT, rediss://, etcd://HOST:PORT,HOST:PORT, etcds:// or http://HOST:PORT/metadata"


@dataclass(frozen=True)
class StoreURL:
    """A parsed store URL.

    kind:    the scheme as written
    hosts:   (host, port) pairs in the order given; empty for memory and sqlite
    path:    file for sqlite, "DB" or "SERVICE/DB" for redis, path for http
    sentinel_user, sentinel_password:  the login at the sentinels; user and password are for the redis that they name
    """

    kind: str
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    @property
    def is_tls(self) -> bool:
        return self.kind in TLS_KINDS or self.kind == "https"

    @property
    def family(self) -> str:
        """The scheme without TLS: redis, redis+sentinel, redis+cluster, etcd, http, sqlite, memory."""
        return "http" if self.kind == "https" else TLS_KINDS.get(self.kind, self.kind)

    def __str__(self) -> str:
        """The URL without its password."""
        if self.kind == "memory":
            return "memory:"
        login = ""
        if self.user is not None or self.password is not None:
            login = f"{self.user or ''}{':***' if self.password is not None else ''}@"
        hosts = ",".join(f"[{h}]:{p}" if ":" in h else f"{h}:{p}" for h, p in self.hosts)
        separator = "/" if self.path and self.family != "http" else ""
        return f"{self.kind}://{login}{hosts}{separator}{self.path}"


def mask_url(url: str) -> str:
    """Any URL or text with what stands between `://` and `@` reduced to the user's name."""
    return re.sub(r"(://)([^/@\s]*@)", lambda m: m.group(1) + _mask_login(m.group(2)), url)


def _mask_login(login: str) -> str:
    user, separator, _ = login.rstrip("@").partition(":")
    return f"{user}:***@" if separator else "***@"


def parse_store_url(url: str) -> StoreURL:
    """Read a store URL. Raises MetadataError naming the part that is wrong; the message never holds the password."""
    text = url.strip()
    if text in ("memory:", "memory://"):
        return StoreURL("memory")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = _without_scheme(text)
    kind = scheme if scheme in ("sqlite", *TLS_KINDS, *DEFAULT_PORTS) else ""
    if not kind:
        shown = mask_url(text) if separator else mask_url(f"://{text}")[3:]
        raise MetadataError(f"{shown!r} is not a metadata store URL", fix=f"use one of {FORMS}")
    if kind == "sqlite":
        path, _, query = rest.partition("?")
        _options(kind, query)
        return _sqlite(path)
    return _networked(kind, _checked(kind, rest))


def _without_scheme(text: str) -> tuple[str, str]:
    # HOST:PORT without a scheme is etcd, as the engine reads it (transfer_engine_py.cpp, parseConnectionString)
    if re.fullmatch(r"[^/?#@\s]+:\d+(,[^/?#@\s]+:\d+)*", text):
        return "etcd", text
    return "", text


def _checked(kind: str, rest: str) -> URLParts:
    """The parts of what follows the scheme; what `mooncake-v0 validate` reports in them is refused here too."""
    character = unencoded_in_password(rest)
    if character:
        raise MetadataError(
            f"an unencoded {character!r} in the password of the {kind}:// URL",
            fix=f"write %{ord(character):02X} for it",
        )
    parts = split_url(rest)
    if parts.login == "":
        raise MetadataError(f"nothing before the '@' of the {kind}:// URL", fix="write USER:PASSWORD or remove the '@'")
    if parts.fragment is not None:
        raise MetadataError(
            f"the {kind}:// URL has a fragment", fix="remove the '#' and what follows, or write %23 for it"
        )
    return parts


def _options(kind: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            shown = name.partition(":")[0]  # what follows a colon may be a password
            raise MetadataError(
                f"a {kind}:// store URL has no option {shown!r}", fix=f"the options are {', '.join(OPTIONS)}"
            )
        if name in SENTINEL_OPTIONS and not kind.endswith("+sentinel"):
            raise MetadataError(f"a {kind}:// store URL has no sentinels for {name!r}", fix="use redis+sentinel://")
    return options


def _sqlite(rest: str) -> StoreURL:
    if not rest.startswith("/") or len(rest) < 2:
        raise MetadataError(
            f"sqlite://{rest} names no file",
            fix="use sqlite:///FILE for a relative or sqlite:////FILE for an absolute path",
        )
    return StoreURL("sqlite", path=unquote(rest[1:]))


def _networked(kind: str, parts: URLParts) -> StoreURL:
    options = _options(kind, parts.query or "")
    user, password = _login(parts.login)
    if "password_file" in options:
        password = _secret_of(options, "password_file")
    family = "http" if kind in ("http", "https") else TLS_KINDS.get(kind, kind)
    default_port = DEFAULT_PORTS[kind] if kind in DEFAULT_PORTS else DEFAULT_PORTS[family]
    hosts = tuple(_host_port(part, default_port, kind) for part in parts.hosts.split(","))
    if len(hosts) > 1 and family in ("redis", "http"):
        raise MetadataError(
            f"a {kind}:// URL takes one host, got {len(hosts)}",
            fix="use redis+sentinel:// or redis+cluster:// for several" if family == "redis" else "give one host",
        )
    return StoreURL(
        kind,
        hosts,
        parts.path if family == "http" else parts.path[1:],
        user,
        password,
        ca=options.get("ca"),
        cert=options.get("cert"),
        key=options.get("key"),
        sentinel_user=options.get("sentinel_user"),
        sentinel_password=_secret_of(options, "sentinel_password_file"),
    )


def _login(login: str | None) -> tuple[str | None, str | None]:
    if not login:
        return None, None
    user, separator, password = login.partition(":")
    return unquote(user) or None, unquote(password) if separator else None


def _host_port(text: str, default_port: int, kind: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s]+)(?::(\d+))?", text)
    port = int(match.group(2)) if match and match.group(2) else default_port
    host = match.group(1).strip("[]") if match else ""
    if not (is_host(host) or is_ipv6(host)) or not 1 <= port <= 65535:
        raise MetadataError(f"{text!r} in the {kind}:// URL is not HOST:PORT", fix="write host:port, port 1..65535")
    return host, port


def _secret_of(options: dict[str, str], name: str) -> str | None:
    if name not in options:
        return None
    path = options[name]
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise MetadataError(
            f"password file {path!r} could not be read: {reason}", fix="check the path and its permissions"
        ) from error
