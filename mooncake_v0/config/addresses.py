"""The two kinds of address in a mooncake.json, taken apart. Text in, frozen data or None out; no I/O, no wording.

An endpoint (`prefill_url`, `decode_url`) is HOST:PORT of an engine: HOST an IPv4 address or a name, because engine
0.3.3.post2 resolves and listens on IPv4 only. A metadata address (`metadata_server`) is SCHEME://[USER[:PASSWORD]@]
HOST[:PORT][,HOST:PORT...][/PATH]; without a scheme it is what `metadata_backend` says, or etcd.

The rules say why something is not an address; `load` and the plugin only need the parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mooncake_v0.config.model import Endpoint
from mooncake_v0.config.source import shorten
from mooncake_v0.digits import port_number
from mooncake_v0.url_parts import IPV4, is_host, is_ipv6, split_host_port, split_url

# what `metadata_backend` may say (upstream's table)
METADATA_BACKENDS = ("etcd", "redis", "http")
# scheme -> the backend that it is a form of; all but plain etcd and http go through a gateway of ours
METADATA_SCHEMES = {
    "etcd": "etcd",
    "etcds": "etcd",
    "http": "http",
    "https": "http",
    "redis": "redis",
    "rediss": "redis",
    "redis+sentinel": "redis",
    "rediss+sentinel": "redis",
    "redis+cluster": "redis",
    "rediss+cluster": "redis",
}
LIST_SCHEMES = tuple(scheme for scheme in METADATA_SCHEMES if scheme.startswith("etcd") or "+" in scheme)
# options after "?" that the gateway's store takes (mooncake_v0/metadata/store_url.py); the engine's own URLs take none
STORE_OPTIONS = ("ca", "cert", "key", "password_file", "sentinel_user", "sentinel_password_file")

ENDPOINT = re.compile(r"(?P<host>[^:\s/\[\]@,]+):(?P<port>[0-9]{1,5})", re.ASCII)
SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.ASCII | re.DOTALL)


def parse_endpoint(text: str) -> Endpoint | None:
    """`Endpoint` for HOST:PORT with a port of 1..65535, else None. Surrounding blanks are not part of the address."""
    match = ENDPOINT.fullmatch(text.strip())
    if match is None or not 1 <= int(match["port"]) <= 65535 or not is_host(match["host"]):
        return None
    return Endpoint(match["host"].lower(), int(match["port"]))


def is_loopback(host: str) -> bool:
    """Whether the text alone says that this is the machine itself."""
    host = host.lower().rstrip(".")
    return (
        host in ("localhost", "::1", "[::1]")
        or host.endswith(".localhost")
        or (IPV4.fullmatch(host) is not None and host.startswith("127."))
    )


def same_host(one: str, other: str) -> bool:
    """Whether two hosts are one machine by their text: equal names, or both loopback."""
    return one.lower().rstrip(".") == other.lower().rstrip(".") or (is_loopback(one) and is_loopback(other))


@dataclass(frozen=True)
class MetadataAddress:
    """A metadata_server taken apart. scheme is in lower case; hosts are (host, port or None) without brackets."""

    scheme: str
    user_info: str
    hosts: tuple[tuple[str, int | None], ...]
    path: str
    query: str
    url: str

    @property
    def host(self) -> str:
        return self.hosts[0][0]

    @property
    def port(self) -> int:
        return self.hosts[0][1] or usual_port(self.scheme)

    @property
    def kind(self) -> str:
        """etcd, http or redis."""
        return METADATA_SCHEMES[self.scheme]

    @property
    def needs_gateway(self) -> bool:
        """Whether engine 0.3.3.post2 cannot use this URL by itself: it has plain etcd (one server) and http."""
        return self.scheme not in ("etcd", "http") or (
            self.scheme == "etcd" and (len(self.hosts) > 1 or bool(self.user_info))
        )


def usual_port(scheme: str) -> int:
    """The port that a metadata server of this scheme has by default."""
    if scheme == "https":
        return 443
    return (
        26379 if scheme.endswith("+sentinel") else {"etcd": 2379, "http": 80, "redis": 6379}[METADATA_SCHEMES[scheme]]
    )


def split_scheme(text: str) -> tuple[str | None, str]:
    """The scheme as written (None without one) and the rest: 'ETCD://h:1' gives ('ETCD', 'h:1')."""
    match = SCHEME.fullmatch(text)
    return (match["scheme"], match["rest"]) if match else (None, text)


def masked(text: str) -> str:
    """The text for a message: not longer than 80 characters, and with PASSWORD in place of a password."""
    return shorten(without_password(text))


def without_password(text: str) -> str:
    """The text with PASSWORD in place of the password of every URL in it; a URL may lack its scheme (then it is etcd's)."""
    return re.sub(r"((?:://|^|[\"'])[^:/@,\s\"']*):[^\s\"]*@", r"\1:PASSWORD@", text)


def effective_scheme(text: str, backend: str | None) -> str:
    """The scheme that counts, in lower case: the prefix, else metadata_backend, else etcd (upstream's default)."""
    scheme, _ = split_scheme(text.strip())
    return (scheme or (backend or "").strip() or "etcd").lower()


def parse_metadata(text: str, backend: str | None = None) -> MetadataAddress | None:
    """`MetadataAddress`, or None if this is not an address of a known kind."""
    scheme = effective_scheme(text, backend)
    _, rest = split_scheme(text.strip())
    if scheme not in METADATA_SCHEMES or re.search(r"\s", rest):
        return None
    parts = split_url(rest)
    if parts.login == "" or parts.fragment is not None:
        return None
    hosts = []
    for item in parts.hosts.split(","):
        host, port = split_host_port(item)
        if port is not None and port_number(port) is None:
            return None
        if not (is_host(host) or is_ipv6(host)):
            return None
        hosts.append((host, port_number(port)))
    return MetadataAddress(scheme, parts.login or "", tuple(hosts), parts.path, parts.query or "", f"{scheme}://{rest}")
