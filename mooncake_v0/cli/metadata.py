"""`mooncake-v0 metadata`: serve, inspect and clean the metadata store."""

from __future__ import annotations

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def metadata() -> None:
    """Serve, inspect and clean the metadata store."""


@metadata.command()
@click.option(
    "--store",
    "store_url",
    default="memory:",
    show_default=True,
    envvar="MOONCAKE_V0_STORE",
    metavar="URL",
    help="Where the keys are kept: memory:, sqlite:///FILE, redis://HOST:PORT/DB, rediss://, etcd://A:2379,B:2379, etcds://.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port; 0 picks a free one."
)
@click.option("--token-file", metavar="FILE", help="Require the token in FILE (bearer, or as the password in the URL).")
@click.option("--basic", "basic_file", metavar="FILE", help="Require one of the user:password lines in FILE.")
@click.option(
    "--ttl", "ttl_s", type=click.FloatRange(min=1), metavar="S", help="Keys vanish S seconds after their last PUT."
)
@click.option("--stale-reads", is_flag=True, help="While the store is down, answer GETs from memory.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 2.5),
    default=2.0,
    show_default=True,
    help="Deadline in seconds for one call of the store; the engine gives up at 3.",
)
def serve(
    store_url: str,
    host: str,
    port: int,
    token_file: str | None,
    basic_file: str | None,
    ttl_s: float | None,
    stale_reads: bool,
    timeout_s: float,
) -> None:
    """Run the HTTP metadata server that the engine talks to.

    \b
    Examples:
      mooncake-v0 metadata serve
      mooncake-v0 metadata serve --store sqlite:///metadata.db --host 10.0.0.5
      mooncake-v0 metadata serve --store redis://10.0.0.9:6379/1 --token-file token

    Then write the printed URL into mooncake.json as metadata_server, with
    "metadata_backend": "http".
    """
    import asyncio
    import logging
    import signal

    from mooncake_v0.metadata.gateway import GatewayOptions
    from mooncake_v0.metadata.gateway import serve as serve_gateway
    from mooncake_v0.metadata.gateway_auth import read_access
    from mooncake_v0.metadata.store import open_store

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options = GatewayOptions(host, port, read_access(token_file, basic_file), ttl_s, stale_reads)
    store = open_store(store_url, timeout_s=timeout_s)

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_gateway(store, options, stop=stop, ready=lambda url: click.echo(url))

    asyncio.run(main())
