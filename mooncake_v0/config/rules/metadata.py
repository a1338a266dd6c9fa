"""Rules about what follows the scheme in metadata_server: login, hosts, ports, path and query.

What engine 0.3.3.post2 makes of a wrong one, measured: http without its path, and a list of etcd hosts, fail after up to
five seconds with no reason.
"""

from __future__ import annotations

import re
from typing import Iterator

from mooncake_v0.config.addresses import LIST_SCHEMES, STORE_OPTIONS, masked, split_scheme, usual_port
from mooncake_v0.config.rules.metadata_scheme import EXAMPLE, WHERE, hosts, parts, scheme, server
from mooncake_v0.config.rules.registry import Finding, Subject, rule
from mooncake_v0.config.source import quote, shorten
from mooncake_v0.digits import port_number
from mooncake_v0.errors import ERROR
from mooncake_v0.url_parts import IPV4, is_host, is_ipv6, unencoded_in_password


@rule(ERROR, syntax=True)
def metadata_login(subject: Subject) -> Iterator[Finding]:
    """The password has a character that ends the host part of a URL: /, ? or #. Or there is an @ with no login before it.

    Write it percent-encoded: %2F for /, %3F for ?, %23 for #; and %40 for @, %25 for % itself.
    """
    character = unencoded_in_password(split_scheme(server(subject))[1])
    if character:
        yield Finding(WHERE, f"an unencoded {character!r} in the password", f"write %{ord(character):02X} for it")
    if parts(subject).login == "":
        yield Finding(WHERE, "nothing before the '@'", "write USER:PASSWORD before it, or remove the '@'")


@rule(ERROR, syntax=True)
def metadata_host_missing(subject: Subject) -> Iterator[Finding]:
    """A scheme or a port, but no host; or an empty place in an etcd list, as after a comma too many."""
    if server(subject) and any(not host for host, _ in hosts(subject)):
        yield Finding(
            WHERE,
            f"a host is missing in {masked(server(subject))!r}",
            f"write SCHEME://HOST:PORT, for example {EXAMPLE}",
        )


@rule(ERROR, syntax=True)
def metadata_ipv6_brackets(subject: Subject) -> Iterator[Finding]:
    """An IPv6 address without brackets, so that nobody can tell where the address ends and the port begins."""
    for host, port in hosts(subject):
        if port is None and is_ipv6(host) and f"[{host}]" not in server(subject):
            address, _, last = host.rpartition(":")
            yield Finding(
                WHERE,
                f"an IPv6 address without brackets: {host!r}",
                f"write [{shorten(address)}]:{last} or [{shorten(host)}]:PORT",
            )


@rule(ERROR, syntax=True)
def metadata_host_syntax(subject: Subject) -> Iterator[Finding]:
    """The host is neither an IPv4 address, nor an IPv6 address in brackets, nor a host name; or blanks are in it."""
    if re.search(r"\s", server(subject)):
        yield Finding(
            WHERE,
            f"blanks inside {masked(server(subject))!r}",
            "remove them; an etcd list is separated by commas alone",
        )
        return
    for host, _ in hosts(subject):
        if host and not is_host(host) and not is_ipv6(host):
            fix = "write the metadata server's IPv4 address or name"
            yield Finding(WHERE, f"{shorten(host)!r} is not a host", fix)


@rule(ERROR, syntax=True)
def metadata_port_range(subject: Subject) -> Iterator[Finding]:
    """The port is not a whole number of 1 to 65535."""
    for _, port in hosts(subject):
        if port is not None and port_number(port) is None:
            usual = usual_port(scheme(subject))
            yield Finding(
                WHERE, f"{shorten(port)!r} is not a port", f"write a number of 1 to 65535, the usual one is {usual}"
            )


@rule(ERROR, syntax=True)
def metadata_wildcard(subject: Subject) -> Iterator[Finding]:
    """0.0.0.0 (or [::]) as the server's address. It is what a server listens on, not where a client finds it."""
    for host, _ in hosts(subject):
        if IPV4.fullmatch(host) and host.startswith("0.") or host == "::":
            yield Finding(
                WHERE,
                f"{host} is not an address to connect to",
                "write the address of the machine that etcd, redis or the http server runs on",
            )


@rule(ERROR, syntax=True)
def metadata_list(subject: Subject) -> Iterator[Finding]:
    """Several servers for a kind that has no such list. Lists are for etcd, redis+sentinel and redis+cluster."""
    kind = scheme(subject)
    if len(list(hosts(subject))) > 1 and kind not in LIST_SCHEMES:
        several = f", or {kind}+sentinel:// or {kind}+cluster:// for several" if kind.startswith("redis") else ""
        yield Finding(WHERE, f"a list of servers with {kind}", f"write one server{several}")


@rule(ERROR, syntax=True)
def metadata_http_path(subject: Subject) -> Iterator[Finding]:
    """An http metadata server without its path, or with a slash too many at its end.

    The engine uses the URL exactly as written and adds only ?key=. The server of the engine's wheel and
    `mooncake-v0 metadata serve` answer at /metadata; at / and /metadata/ they answer 404, and the engine fails with
    -1 and no reason.
    """
    text = server(subject)
    if text and scheme(subject) in ("http", "https"):
        path = parts(subject).path[1:]
        if not path or path.endswith("/"):
            base = re.split(r"[?#]", text)[0].rstrip("/")
            fixed = base if path.rstrip("/") else f"{base}/metadata"
            etcd = " (if port 2379 is an etcd, write etcd:// instead of http://)" if ":2379" in text else ""
            yield Finding(
                WHERE,
                f"{masked(text)!r} {'ends with a slash' if path.rstrip('/') else 'has no path'}",
                f"write {quote(masked(fixed))}{etcd}",
            )


@rule(ERROR, syntax=True)
def metadata_query(subject: Subject) -> Iterator[Finding]:
    """A query or fragment that cannot be in this URL.

    The engine appends ?key=... to an http URL, so that with a query all keys would become one wrong key. The other
    kinds, which go through a gateway, take the options ca, cert, key and password_file: etcds://host:2379?ca=ca.pem
    redis+sentinel takes sentinel_user and sentinel_password_file besides, for sentinels with a login of their own.
    """
    _, _, _, query, fragment = parts(subject)
    if fragment is not None:
        encoded = ", or write %23 if it belongs to the option's value" if query else ""
        yield Finding(
            WHERE,
            f"the URL has a fragment: {masked(server(subject))!r}",
            f"remove the '#' and what follows{encoded}",
        )
    if query is None:
        return
    if scheme(subject) in ("etcd", "http"):
        yield Finding(WHERE, f"the URL has a query: {masked(server(subject))!r}", "remove the '?' and what follows")
        return
    of_sentinels = scheme(subject).endswith("+sentinel")
    options = [name for name in STORE_OPTIONS if of_sentinels or not name.startswith("sentinel_")]
    unknown = [part for part in query.split("&") if part.partition("=")[0] not in options]
    if unknown:
        yield Finding(
            WHERE, f"unknown option {masked(unknown[0])!r} in the URL", f"the options are {', '.join(options)}"
        )


@rule(ERROR, syntax=True)
def metadata_path(subject: Subject) -> Iterator[Finding]:
    """A path where none belongs: etcd has none, redis only a database number (redis://host:6379/2).

    redis+sentinel has the service's name first: redis+sentinel://host:26379/mymaster/2.
    """
    kind = scheme(subject)
    path = parts(subject).path[1:]
    allowed = (
        r"[^/]+(/[0-9]{0,3})?" if kind.endswith("+sentinel") else r"[0-9]{0,3}" if kind.startswith("redis") else r""
    )
    if kind not in ("http", "https") and not re.fullmatch(allowed, path):
        fixed = re.sub(r"(?<![/:])/.*", "", server(subject))
        fix = (
            f"write {quote(masked(fixed + '/mymaster'))}"
            if kind.endswith("+sentinel")
            else f"write {quote(masked(fixed))}"
        )
        http = " (or http:// before it, if it is an http server)" if path == "metadata" else ""
        what = f"/{shorten(path)} is not a path of {kind}" if path else f"{kind} needs the service's name as its path"
        yield Finding(WHERE, what, fix + http)


@rule(ERROR, syntax=True)
def metadata_port_missing(subject: Subject) -> Iterator[Finding]:
    """A plain etcd address without a port. The engine passes the text to etcd's client as it is, which needs a port.

    What goes through a gateway (etcds://, a cluster, a password) has 2379 by default.
    """
    found = list(hosts(subject))
    if scheme(subject) != "etcd" or len(found) != 1 or parts(subject).login:
        return
    host, port = found[0]
    if port is None and host:
        shown = f"[{host}]" if ":" in host else shorten(host)
        yield Finding(WHERE, f"no port after {shown!r}", f"write {shown}:2379, if etcd has its usual port")
