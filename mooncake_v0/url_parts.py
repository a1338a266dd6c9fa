"""A URL's text taken apart, for the check of mooncake.json and for the stores, which so cannot disagree about one.

Text in, parts out; no I/O. What a scheme, a port or an option means is the reader's business.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?", re.ASCII)
IPV4 = re.compile(r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])(\.(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])){3}")


class URLParts(NamedTuple):
    """What follows a scheme. None and '' differ: without a "?" the query is None, after a "?" with nothing behind it ''."""

    login: str | None
    hosts: str
    path: str
    query: str | None
    fragment: str | None


def split_url(rest: str) -> URLParts:
    """The text after the scheme, split as every reader of it has to: an "@" behind the first of / ? # is no login's end.

    The rules, `parse_metadata` and the stores' `parse_store_url` all split here.
    """
    before, mark, fragment = rest.partition("#")
    before, question, query = before.partition("?")
    authority, slash, path = before.partition("/")
    login, at, hosts = authority.rpartition("@")
    return URLParts(login if at else None, hosts, slash + path, query if question else None, fragment if mark else None)


def unencoded_in_password(rest: str) -> str | None:
    """The / ? or # that ends the host part too early, because it is meant as a part of the password before an "@"."""
    authority = re.split(r"[/?#]", rest)[0]
    behind = rest[len(authority) :]
    if ":" not in authority or "@" in authority or "@" not in behind:
        return None
    servers = [split_host_port(item) for item in authority.split(",")]
    if all((is_host(host) or is_ipv6(host)) and (port or "0").isdecimal() for host, port in servers):
        return None  # HOST:PORT, and the "@" stands in a path or a query
    return behind[0]


def split_host_port(text: str) -> tuple[str, str | None]:
    """('h', '1') for 'h:1', ('::1', '1') for '[::1]:1', ('h', None) without a port; the port as written."""
    if text.startswith("["):
        host, _, tail = text[1:].partition("]")
        return host, tail[1:] if tail.startswith(":") else (tail or None)
    host, colon, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    return host, port if colon else None


def is_host(host: str) -> bool:
    """Whether this is a plain IPv4 address or a name; `10.0.0.256`, `10.0.1` and `1234` are neither."""
    if re.fullmatch(r"[0-9.]+", host):
        return IPV4.fullmatch(host) is not None
    return len(host) <= 253 and HOST_NAME.fullmatch(host) is not None


def is_ipv6(host: str) -> bool:
    """Whether this is an IPv6 address without brackets; a zone (%eth0) may follow."""
    if ":" not in host:
        return False
    import ipaddress  # 3 ms that only an IPv6 address has to pay

    try:
        ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return False
    return True
