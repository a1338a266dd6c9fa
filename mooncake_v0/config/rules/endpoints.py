"""Rules about prefill_url and decode_url: HOST:PORT of an engine, not an http URL.

What engine 0.3.3.post2 makes of a wrong one, measured: it accepts every text as a name and returns success; with
MC_LEGACY_RPC_PORT_BINDING it parses at the first colon, takes port 12001 if there is none, and advertises the host as
written. So nothing but these rules stands between a typo and a pair that never transfers.
"""

from __future__ import annotations

import re
from typing import Callable, Iterator

from mooncake_v0.config.addresses import is_loopback
from mooncake_v0.config.model import ROLES
from mooncake_v0.config.rules.registry import FIELDS, Check, Edit, Finding, Subject, rule
from mooncake_v0.config.source import quote, shorten
from mooncake_v0.digits import port_number
from mooncake_v0.errors import ERROR, INFO, WARNING
from mooncake_v0.url_parts import IPV4, is_host, is_ipv6

FieldCheck = Callable[[str, str], Iterator[Finding]]
PLACEHOLDER = re.compile(r"[<>{}$]|\b[xX]\.[xX]\.[xX]\.[xX]\b|\b(?:your|YOUR)[_-]")
EXAMPLE = "192.168.0.137:13003"


def endpoint_rule(severity: str) -> Callable[[FieldCheck], FieldCheck]:
    """Register a check of one endpoint's text (field name, text) as a rule over both endpoints."""

    def register(check: FieldCheck) -> FieldCheck:
        def both(subject: Subject) -> Iterator[Finding]:
            for role in ROLES:
                text = subject.text(FIELDS[role])
                if text is not None:
                    yield from check(FIELDS[role], text)

        both.__name__, both.__doc__ = check.__name__, check.__doc__
        as_rule: Check = both
        rule(severity, syntax=True)(as_rule)
        return check

    return register


@rule(ERROR, syntax=True)
def placeholder(subject: Subject) -> Iterator[Finding]:
    """A placeholder of a template is still there: <host>, ${HOST}, {{ host }}, x.x.x.x, YOUR_IP.

    The connector does not expand variables; fill the template before the file is used.
    """
    for name in ("prefill_url", "decode_url", "metadata_server", "device_name"):
        text = subject.text(name)
        if text is not None and PLACEHOLDER.search(text):
            yield Finding(
                (name,),
                f"{name} still holds a placeholder: {shorten(text)!r}",
                "write the real value; variables are not expanded",
            )


@endpoint_rule(ERROR)
def endpoint_empty(name: str, text: str) -> Iterator[Finding]:
    """prefill_url or decode_url is an empty text."""
    if not text.strip():
        yield Finding(
            (name,),
            f"{name} is empty",
            f"write HOST:PORT of the {_side(name)} instance's engine, for example {quote(EXAMPLE)}",
        )


@endpoint_rule(WARNING)
def endpoint_blanks(name: str, text: str) -> Iterator[Finding]:
    """Blanks before or after the address. They are ignored here; upstream's connector takes them for a part of it."""
    if text != text.strip() and text.strip():
        yield Finding(
            (name,), f"blanks around {shorten(text.strip())!r}", "remove the blanks", Edit((name,), text.strip())
        )


@endpoint_rule(ERROR)
def endpoint_scheme(name: str, text: str) -> Iterator[Finding]:
    """prefill_url or decode_url starts with http:// or another scheme.

    In spite of their names they are not URLs: the engines' host and port, without anything before. The address of the
    OpenAI API is not in this file at all; the proxy gets it.
    """
    if "://" in text:
        rest = text.strip().split("://", 1)[1].split("/")[0]
        yield Finding(
            (name,), f"{name} has a scheme: {shorten(text)!r}", f"write only HOST:PORT: {quote(shorten(rest))}"
        )


@endpoint_rule(ERROR)
def endpoint_list(name: str, text: str) -> Iterator[Finding]:
    """Several addresses in one field. A V0 pair is one prefill and one decode instance.

    For several instances write one mooncake.json for each pair, and give all pairs to the proxy.
    """
    if "," in text or ";" in text:
        yield Finding(
            (name,),
            f"{name} holds a list: {shorten(text)!r}",
            "keep one HOST:PORT; write one mooncake.json for each pair",
        )


@endpoint_rule(ERROR)
def endpoint_ipv6(name: str, text: str) -> Iterator[Finding]:
    """An IPv6 address. Engine 0.3.3.post2 listens on IPv4 and resolves names to IPv4 only.

    Measured: with MC_USE_IPV6=1 it advertises the IPv6 address, and every transfer fails with "Host not found"; with
    [::1]:13003 it takes "[" for the host. Use an IPv4 address of the same machine, or a name with an A record.
    """
    text = text.strip()
    if text.startswith("[") or is_ipv6(text) or is_ipv6(text.rpartition(":")[0]):
        hint = "" if text.startswith("[") else " (an IPv6 address with a port would be written [ADDRESS]:PORT)"
        fix = f"write the machine's IPv4 address, for example {quote(EXAMPLE)}"
        yield Finding((name,), f"the engine has no IPv6, got {shorten(text)!r}{hint}", fix)


@endpoint_rule(ERROR)
def endpoint_path(name: str, text: str) -> Iterator[Finding]:
    """A slash, question mark or hash in HOST:PORT. With a slash the engine files itself under a key nobody looks for."""
    if re.search(r"[/?#]", text):
        host_port = re.split(r"[/?#]", text.strip())[0]
        yield Finding(
            (name,), f"{name} has a path: {shorten(text)!r}", f"write only HOST:PORT: {quote(shorten(host_port))}"
        )


@endpoint_rule(ERROR)
def endpoint_port_missing(name: str, text: str) -> Iterator[Finding]:
    """No port. The engine would silently take 12001 on both sides."""
    text = text.strip()
    if ":" not in text or text.endswith(":") and text.count(":") == 1:
        host = text.rstrip(":")
        yield Finding((name,), f"{name} has no port: {shorten(text)!r}", f"add one: {quote(shorten(host) + ':13003')}")


@endpoint_rule(ERROR)
def endpoint_colons(name: str, text: str) -> Iterator[Finding]:
    """More than one colon: HOST:PORT has exactly one."""
    if text.count(":") > 1:
        yield Finding(
            (name,),
            f"{name} has {text.count(':')} colons: {shorten(text)!r}",
            f"write HOST:PORT, for example {quote(EXAMPLE)}",
        )


@endpoint_rule(ERROR)
def endpoint_host_missing(name: str, text: str) -> Iterator[Finding]:
    """A port without a host. The host is what the other side connects to, so it cannot be left out."""
    if text.strip().startswith(":"):
        yield Finding(
            (name,),
            f"{name} has no host: {shorten(text)!r}",
            f"write the {_side(name)} machine's address before the port: {quote('192.168.0.137' + shorten(text.strip()))}",
        )


@endpoint_rule(ERROR)
def endpoint_port_number(name: str, text: str) -> Iterator[Finding]:
    """The port is not a whole number in digits."""
    port = text.strip().rpartition(":")[2]
    if not re.fullmatch(r"[0-9]+", port):
        yield Finding(
            (name,),
            f"the port of {name} is not a number: {shorten(port)!r}",
            "write a port of 1024 to 65488, for example 13003",
        )


@endpoint_rule(ERROR)
def endpoint_port_range(name: str, text: str) -> Iterator[Finding]:
    """The port is 0 or above 65535. The engine would silently take 12001 instead."""
    port = text.strip().rpartition(":")[2]
    if port_number(port) is None:
        yield Finding(
            (name,),
            f"port {shorten(port)} of {name} does not exist",
            "write a port of 1024 to 65488, for example 13003",
        )


@endpoint_rule(ERROR)
def endpoint_ipv4(name: str, text: str) -> Iterator[Finding]:
    """Digits and dots that are no IPv4 address: a number above 255, a leading zero, or not four of them."""
    host = _host(text)
    if re.fullmatch(r"[0-9.]+", host) and not IPV4.fullmatch(host):
        yield Finding(
            (name,), f"{host!r} is not an IPv4 address", "write four numbers of 0 to 255, without leading zeros"
        )


@endpoint_rule(ERROR)
def endpoint_host_syntax(name: str, text: str) -> Iterator[Finding]:
    """The host is neither an IPv4 address nor a host name (letters, digits, "-", "_" and dots)."""
    host = _host(text)
    if not is_host(host):
        yield Finding(
            (name,),
            f"{shorten(host)!r} is not a host name",
            "write the machine's IPv4 address, as `ip -4 addr` shows it",
        )


@endpoint_rule(ERROR)
def endpoint_wildcard(name: str, text: str) -> Iterator[Finding]:
    """0.0.0.0 means "every address" to a server and nothing to a client.

    The configured host is what the peer connects to, so 0.0.0.0 sends it to itself. The engine listens on all
    addresses anyway; the side channel binds exactly the address written here.
    """
    if IPV4.fullmatch(_host(text)) and _host(text).startswith("0."):
        yield Finding(
            (name,),
            f"{_host(text)} is not an address that the peer can connect to",
            f"write the {_side(name)} machine's own address, as `ip -4 addr` shows it",
        )


@endpoint_rule(ERROR)
def endpoint_not_unicast(name: str, text: str) -> Iterator[Finding]:
    """A multicast, reserved or broadcast address (224.0.0.0 and above); no machine has one of its own."""
    host = _host(text)
    if IPV4.fullmatch(host) and int(host.split(".")[0]) >= 224:
        yield Finding(
            (name,),
            f"{host} is not one machine's address",
            f"write the {_side(name)} machine's own address, as `ip -4 addr` shows it",
        )


@endpoint_rule(WARNING)
def endpoint_privileged_port(name: str, text: str) -> Iterator[Finding]:
    """A port below 1024: only root (or CAP_NET_BIND_SERVICE) may bind it, and other services live there."""
    port = int(text.strip().rpartition(":")[2])
    if port < 1024:
        yield Finding((name,), f"port {port} of {name} needs root", "use a port of 1024 or more, for example 13003")


@endpoint_rule(INFO)
def endpoint_host_name(name: str, text: str) -> Iterator[Finding]:
    """A name instead of an address. It works, at a price.

    It is resolved again for every transfer, as the engine does it (tcp_transport.cpp of 0.3.3.post2), and the first
    IPv4 answer is taken. The name must resolve on both machines, to an address of that machine that the peer reaches;
    on Debian, the machine's own name in /etc/hosts is often 127.0.1.1. `--online` resolves it.
    """
    host = _host(text)
    if not IPV4.fullmatch(host):
        better = "127.0.0.1" if is_loopback(host) else "the IPv4 address"
        yield Finding(
            (name,), f"{shorten(host)!r} is looked up for every transfer", f"write {better} if it does not change"
        )


def _host(text: str) -> str:
    return text.strip().rpartition(":")[0]


def _side(name: str) -> str:
    return "prefill" if name == "prefill_url" else "decode"
