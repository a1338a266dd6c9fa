"""`mooncake-v0 metadata`: serve, inspect and clean the metadata store."""

from __future__ import annotations

import click

from mooncake_v0.cli.metadata_change import import_command, prune, put, rm
from mooncake_v0.cli.metadata_show import check, export, get, ls, watch


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def metadata() -> None:
    """Serve, inspect and clean the metadata store.

    SOURCE is a mooncake.json or a store URL:

    \b
      http://HOST:PORT/metadata    `metadata serve`, or the engine's own server
      etcd://A:2379,B:2379         etcds:// for TLS: ?ca=F&cert=F&key=F
      redis://USER:PASS@HOST/DB    rediss://, redis+sentinel://, redis+cluster://
      sqlite:///FILE               sqlite:////FILE for an absolute path

    ?password_file=FILE keeps a password out of the process list; sentinels with a login of
    their own take ?sentinel_user=NAME&sentinel_password_file=FILE besides.
    """


@metadata.command()
@click.option(
    "--store",
    "store_url",
    default="memory:",
    show_default=True,
    envvar="MOONCAKE_V0_STORE",
    metavar="URL",
    help="Where the keys are kept; also from $MOONCAKE_V0_STORE.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port; 0 picks one.")
@click.option("--token-file", metavar="FILE", help="Let in only who has the token in FILE.")
@click.option("--basic", "basic_file", metavar="FILE", help="Let in only the user:password lines in FILE.")
@click.option(
    "--ttl",
    "ttl_s",
    type=click.FloatRange(min=1),
    metavar="S",
    help="Keys vanish S seconds after a PUT.",
)
@click.option("--stale-reads", is_flag=True, help="While the store is down, answer GETs from memory.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 2.5),
    default=2.0,
    show_default=True,
    help="Seconds for one call of the store; the engine gives up at 3.",
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
      mooncake-v0 metadata serve --store redis://10.0.0.9/1 --token-file token

    The first line of output is the URL for metadata_server in mooncake.json. With
    a token, write it as http://any:TOKEN@HOST:PORT/metadata; the engine sends no
    other kind of login. --ttl needs agents that publish again, as this package's
    do; a stock engine never does. GET /health and /metrics are there for probes.
    """
    import asyncio
    import logging
    import signal

    from mooncake_v0.metadata.gateway_auth import read_access
    from mooncake_v0.metadata.gateway_server import GatewayOptions, raise_file_limit
    from mooncake_v0.metadata.gateway_server import serve as serve_gateway
    from mooncake_v0.metadata.liveness import is_loopback
    from mooncake_v0.metadata.store import open_store

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options = GatewayOptions(host, port, read_access(token_file, basic_file), ttl_s, stale_reads)
    store = open_store(store_url, timeout_s=timeout_s)
    raise_file_limit()
    logging.info("store %s", store.url)
    if options.access.is_open and not is_loopback(host):
        logging.warning("whoever reaches %s can read and write: there is no --token-file and no --basic", host)

    async def main() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await serve_gateway(store, options, stop=stop, ready=click.echo)

    asyncio.run(main())


SUBCOMMANDS: tuple[click.Command, ...] = (ls, get, put, rm, watch, check, prune, export, import_command)
for subcommand in SUBCOMMANDS:
    metadata.add_command(subcommand)
