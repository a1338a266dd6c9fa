"""`mooncake-v0 proxy`: arguments to settings, then serve."""

from __future__ import annotations

import asyncio

import click


@click.command(help=__doc__)
@click.option("--prefill", metavar="URL", help="URL of the prefill instance.")
@click.option("--decode", metavar="URL", help="URL of the decode instance.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
def proxy(prefill: str, decode: str, host: str, port: int) -> None:
    from mooncake_v0.proxy.app import Proxy
    from mooncake_v0.proxy.server import Bind, serve_proxy
    from mooncake_v0.proxy.settings import PairSpec, ProxySettings

    pairs = [PairSpec("pair-0", prefill.rstrip("/"), decode.rstrip("/"))]
    asyncio.run(serve_proxy(Proxy(ProxySettings(), pairs), Bind(host, port)))
