"""Rules about the kind of metadata server: metadata_backend, and the scheme of metadata_server.

What engine 0.3.3.post2 makes of a wrong one, measured: an unknown or upper-case scheme, and redis, end the whole
process with SIGABRT. What only the engine cannot use (redis, etcd clusters, passwords, TLS) is valid in this file: the
plugin starts a private http gateway for it.
"""

from __future__ import annotations

import difflib
import re
from typing import Iterator

from mooncake_v0.config.addresses import METADATA_BACKENDS, METADATA_SCHEMES, effective_scheme, masked, split_scheme
from mooncake_v0.config.rules.registry import Edit, Finding, Subject, rule
from mooncake_v0.config.source import quote, shorten
from mooncake_v0.errors import ERROR, WARNING
from mooncake_v0.url_parts import URLParts, split_host_port, split_url, unencoded_in_password

WHERE = ("metadata_server",)
BACKEND = ("metadata_backend",)
EXAMPLE = '"etcd://192.168.0.139:2379"'


def server(subject: Subject) -> str:
    """The text without surrounding blanks; '' if there is none, which `missing-field` or `metadata-empty` reports."""
    return (subject.text("metadata_server") or "").strip()


def parts(subject: Subject) -> URLParts:
    """What follows the scheme. With a password that cuts the URL short, which `metadata-login` reports, what is meant."""
    _, rest = split_scheme(server(subject))
    if unencoded_in_password(rest):
        return split_url("@" + rest.rpartition("@")[2])._replace(login="USER:PASSWORD")
    return split_url(rest)


def hosts(subject: Subject) -> Iterator[tuple[str, str | None]]:
    """Host and port as written, one pair for each server in the list."""
    for item in parts(subject).hosts.split(","):
        yield split_host_port(item)


def scheme(subject: Subject) -> str:
    """The scheme that counts, in lower case; etcd in place of an unknown one, which has been reported."""
    found = effective_scheme(server(subject), subject.text("metadata_backend"))
    return found if found in METADATA_SCHEMES else "etcd"


@rule(ERROR, syntax=True)
def metadata_backend_unknown(subject: Subject) -> Iterator[Finding]:
    """metadata_backend is none of etcd, redis and http.

    It may be left out; the scheme of metadata_server then counts.
    """
    backend = subject.text("metadata_backend")
    if backend is not None and backend.strip().lower() not in METADATA_BACKENDS:
        near = difflib.get_close_matches(backend.strip().lower(), METADATA_BACKENDS, n=1)
        fix = (
            f"write {quote(near[0])}"
            if near
            else "write etcd, redis or http, or remove the line and put a scheme before metadata_server"
        )
        yield Finding(BACKEND, f"unknown metadata_backend {shorten(backend)!r}", fix)


@rule(WARNING, syntax=True)
def metadata_backend_case(subject: Subject) -> Iterator[Finding]:
    """metadata_backend has capitals or blanks. It is read as meant here; the engine alone would abort on it."""
    backend = subject.text("metadata_backend")
    if backend is not None and backend not in METADATA_BACKENDS and backend.strip().lower() in METADATA_BACKENDS:
        plain = backend.strip().lower()
        yield Finding(
            BACKEND, f"metadata_backend {backend!r} is not in lower case", f"write {quote(plain)}", Edit(BACKEND, plain)
        )


@rule(ERROR, syntax=True)
def metadata_empty(subject: Subject) -> Iterator[Finding]:
    """metadata_server is an empty text. V0 has no peer-to-peer mode; both sides meet at a metadata server."""
    if subject.text("metadata_server") is not None and not server(subject):
        yield Finding(WHERE, "metadata_server is empty", f"write its address, for example {EXAMPLE}")


@rule(WARNING, syntax=True)
def metadata_blanks(subject: Subject) -> Iterator[Finding]:
    """Blanks before or after the address. They are ignored here; the engine would take them for a part of it."""
    text = subject.text("metadata_server")
    if text is not None and text != text.strip() and text.strip():
        yield Finding(WHERE, f"blanks around {masked(text.strip())!r}", "remove the blanks", Edit(WHERE, text.strip()))


@rule(ERROR, syntax=True)
def metadata_p2phandshake(subject: Subject) -> Iterator[Finding]:
    """P2PHANDSHAKE is a mode of the Mooncake Store and of later connectors, without a metadata server.

    The V0 pair needs one. The smallest is `mooncake-v0 metadata serve`, which needs neither etcd nor redis.
    """
    if server(subject).upper() == "P2PHANDSHAKE":
        fix = 'run `mooncake-v0 metadata serve --host HOST` on one machine and write "http://HOST:8080/metadata"'
        yield Finding(WHERE, "P2PHANDSHAKE is not a metadata server", fix)


@rule(ERROR, syntax=True)
def metadata_scheme_slashes(subject: Subject) -> Iterator[Finding]:
    """A scheme without its "://": etcd:host, http:/host."""
    match = re.match(r"([A-Za-z]+)(:/?|//)(?!/)", server(subject))
    if match and match[1].lower() in METADATA_SCHEMES and "://" not in server(subject):
        rest = server(subject)[match.end() :]
        fixed = f"{match[1].lower()}://{rest}"
        if not rest.isdigit():
            yield Finding(WHERE, f"{match[0]!r} is not a scheme", f"write {quote(masked(fixed))}")


@rule(ERROR, syntax=True)
def metadata_scheme_unknown(subject: Subject) -> Iterator[Finding]:
    """The scheme is none of etcd, etcds, http, https, redis and rediss.

    The engine aborts the whole vLLM process on a scheme that it does not know; Python cannot catch that.
    """
    written, separator, _ = server(subject).partition("://")
    if separator and written.lower() not in METADATA_SCHEMES:
        near = difflib.get_close_matches(written.lower(), METADATA_SCHEMES, n=1)
        fix = f"write {near[0]}://" if near else f"use etcd://, http:// or redis://, for example {EXAMPLE}"
        yield Finding(WHERE, f"unknown scheme {shorten(written)!r}", fix)


@rule(WARNING, syntax=True)
def metadata_scheme_case(subject: Subject) -> Iterator[Finding]:
    """The scheme has capitals. It is read as meant here; the engine alone aborts the whole process on HTTP://."""
    written, rest = split_scheme(server(subject))
    if written is not None and written != written.lower():
        fixed = f"{written.lower()}://{rest}"
        yield Finding(
            WHERE, f"scheme {written!r} is not in lower case", f"write {quote(masked(fixed))}", Edit(WHERE, fixed)
        )


@rule(ERROR, syntax=True)
def metadata_two_schemes(subject: Subject) -> Iterator[Finding]:
    """Two schemes, as in etcd://http://host:2379. The engine takes etcd's plain host:port; TLS to etcd is etcds://."""
    outer, rest = split_scheme(server(subject))
    inner, inner_rest = split_scheme(rest)
    if outer is not None and inner is not None:
        first = outer.lower()
        kept = "etcds" if first == "etcd" and inner.lower() == "https" else first
        yield Finding(WHERE, f"two schemes: {outer}://{inner}://", f"write {quote(masked(kept + '://' + inner_rest))}")
