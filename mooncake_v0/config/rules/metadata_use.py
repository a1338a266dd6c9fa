"""Rules about the metadata server together with the other fields, and notes on what goes through a gateway.

The syntax of metadata_server has been judged in `rules.metadata_scheme` and `rules.metadata`; here it is taken apart already.
"""

from __future__ import annotations

from typing import Iterator

from mooncake_v0.config.addresses import (
    METADATA_BACKENDS,
    METADATA_SCHEMES,
    is_loopback,
    masked,
    same_host,
    split_scheme,
)
from mooncake_v0.config.rules.metadata_scheme import BACKEND, WHERE, server
from mooncake_v0.config.rules.registry import Edit, Finding, Subject, rule
from mooncake_v0.config.source import quote
from mooncake_v0.errors import ERROR, INFO, WARNING


@rule(ERROR)
def metadata_backend_mismatch(subject: Subject) -> Iterator[Finding]:
    """The scheme of metadata_server and metadata_backend contradict each other.

    Upstream takes the scheme and silently ignores metadata_backend. One of the two was forgotten in a change.
    """
    written, _ = split_scheme(server(subject))
    backend = (subject.text("metadata_backend") or "").strip().lower()
    if written is None or written.lower() not in METADATA_SCHEMES or backend not in METADATA_BACKENDS:
        return
    if METADATA_SCHEMES[written.lower()] != backend:
        what = f"metadata_backend is {backend}, but metadata_server starts with {written}://"
        fix = f"remove metadata_backend if {written}:// is right, else change the scheme"
        yield Finding(BACKEND, what, fix, related=(WHERE,))


@rule(ERROR)
def metadata_loopback(subject: Subject) -> Iterator[Finding]:
    """The metadata server is "localhost", but prefill and decode are two machines.

    Each of them would look for the server on itself.
    """
    prefill, decode, metadata = subject.final["prefill"], subject.final["decode"], subject.metadata
    if prefill is None or decode is None or metadata is None:
        return
    if any(is_loopback(host) for host, _ in metadata.hosts) and not same_host(prefill.host, decode.host):
        what = f"{metadata.host} is another machine for each of {prefill.host} and {decode.host}"
        related = (("prefill_url",), ("decode_url",))
        yield Finding(WHERE, what, "write the address of the machine that the metadata server runs on", related=related)


@rule(WARNING)
def metadata_usual_port(subject: Subject) -> Iterator[Finding]:
    """The port is another service's usual one: 6379 is redis, 2379 is etcd for clients, 2380 is etcd among themselves.

    An address without a scheme is taken for etcd, whatever its port.
    """
    if subject.metadata is None:
        return
    kind = subject.metadata.kind
    usual = {6379: "redis", 2379: "etcd", 2380: "etcd's port for its own cluster"}
    for _, port in subject.metadata.hosts:
        if port in usual and usual[port] != kind:
            fix = "use 2379" if port == 2380 else f"write {usual[port]}:// before it, if that is what runs there"
            yield Finding(WHERE, f"port {port} is usually {usual[port]}, used here as {kind}", fix, related=(BACKEND,))


@rule(INFO)
def metadata_prefix_missing(subject: Subject) -> Iterator[Finding]:
    """metadata_server has no scheme. It is taken for what metadata_backend says, or for etcd.

    Upstream announced that metadata_backend will go, so a scheme in metadata_server is the form that lasts.
    """
    text = server(subject)
    if subject.metadata is not None and split_scheme(text)[0] is None:
        fixed = subject.metadata.url
        what = f"no scheme before {masked(text)!r}, taken for {subject.metadata.scheme}"
        yield Finding(WHERE, what, f"write {quote(masked(fixed))}", Edit(WHERE, fixed))


@rule(INFO)
def metadata_backend_deprecated(subject: Subject) -> Iterator[Finding]:
    """metadata_backend is the old way to name the kind of metadata server; upstream announced its end.

    A scheme in metadata_server says the same. The line does no harm while both agree.
    """
    backend = subject.text("metadata_backend")
    if subject.metadata is not None and backend == subject.metadata.kind and split_scheme(server(subject))[0]:
        yield Finding(BACKEND, "metadata_backend repeats the scheme of metadata_server", "remove the line")


def _gateway_fix(subject: Subject) -> str:
    assert subject.metadata is not None
    command = f"mooncake-v0 metadata serve --store {quote(masked(subject.metadata.url))} --host HOST"
    return (
        f"nothing, the plugin starts one; or run one gateway for all: `{command}` "
        'and write "metadata_server": "http://HOST:8080/metadata"'
    )


@rule(INFO)
def metadata_redis(subject: Subject) -> Iterator[Finding]:
    """A redis metadata server. The published engine wheels have no redis plugin and abort the process on redis://.

    With this package it works: the plugin starts a private http gateway in front of redis and gives the engine that.
    One gateway for all hosts can be run instead; the finding gives the two lines.
    """
    if subject.metadata is not None and subject.metadata.kind == "redis":
        yield Finding(WHERE, "the engine cannot speak redis, a gateway is put in front of it", _gateway_fix(subject))


@rule(INFO)
def metadata_etcd_cluster(subject: Subject) -> Iterator[Finding]:
    """A list of etcd servers. The engine takes exactly one; a list fails in it after five seconds.

    With this package it works: the plugin starts a private http gateway that talks to the whole cluster.
    """
    if subject.metadata is not None and subject.metadata.scheme == "etcd" and len(subject.metadata.hosts) > 1:
        yield Finding(WHERE, "the engine takes one etcd server, a gateway talks to the cluster", _gateway_fix(subject))


@rule(INFO)
def metadata_credentials(subject: Subject) -> Iterator[Finding]:
    """User and password in metadata_server. The engine cannot log in to etcd; with http it sends them as Basic auth.

    With this package a private gateway logs in. The file then holds a password: keep it readable for vLLM's user only.
    """
    if subject.metadata is not None and subject.metadata.user_info and subject.metadata.scheme in ("etcd", "etcds"):
        yield Finding(WHERE, "the engine cannot log in to etcd, a gateway does", _gateway_fix(subject))


@rule(INFO)
def metadata_tls(subject: Subject) -> Iterator[Finding]:
    """A metadata server behind TLS: https or etcds.

    The engine trusts only the system's certificate store for https (SSL_CERT_FILE and CURL_CA_BUNDLE have no effect on
    it) and has no client certificates. With this package a private gateway makes the connection.
    """
    if (
        subject.metadata is not None
        and subject.metadata.scheme in ("https", "etcds")
        and not subject.metadata.user_info
    ):
        yield Finding(
            WHERE, f"the engine's own {subject.metadata.scheme} is limited, a gateway connects", _gateway_fix(subject)
        )
