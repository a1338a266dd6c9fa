"""`mooncake-v0 proxy`: arguments to settings, then serve until a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mooncake_v0.errors import ProxyError

if TYPE_CHECKING:
    from mooncake_v0.proxy.access_log import AccessLog
    from mooncake_v0.proxy.core import Sources
    from mooncake_v0.proxy.settings import PairSpec, ProxySettings

FIRST_ACTIVATED_FD = 3  # sd_listen_fds(3)
SECONDS = click.FloatRange(min=0.001)
COUNT = click.IntRange(min=1)
EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

HELP = """Serve the OpenAI API in front of pairs of prefill and decode instances.

Every request goes to the prefill instance of a pair for one token, then, unchanged, to the decode instance of the same
pair, whose answer is passed on byte for byte.

\b
Examples:
  mooncake-v0 proxy --prefill http://prefill:8100 --decode http://decode:8200
  mooncake-v0 proxy --pair http://a:8100,http://b:8200 \\
                    --pair http://c:8100,http://d:8200
  mooncake-v0 proxy --pairs pairs.toml --admin-port 8001
  mooncake-v0 proxy --discover etcd://10.0.0.9:2379 --host 0.0.0.0
"""


@click.command(help=HELP)
@click.option("--prefill", metavar="URL", help="Prefill instance of the only pair.")
@click.option("--decode", metavar="URL", help="Decode instance of the only pair.")
@click.option("--pair", "pair", metavar="URL,URL", multiple=True, help="Prefill and decode of a pair; may be repeated.")
@click.option("--pairs", metavar="FILE", type=EXISTING_FILE, help="TOML or JSON file of pairs; read again on change.")
@click.option("--discover", metavar="URL", help="Metadata store where instances register: etcd, redis, http, sqlite.")
@click.option("--discover-token-file", type=EXISTING_FILE, help="Bearer token of an http store.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port; 0 picks a free one."
)
@click.option("--listen-fd", type=click.IntRange(min=0), help="Listening socket handed in, in place of host and port.")
@click.option("--ssl-certfile", type=EXISTING_FILE, help="Serve https with this certificate chain.")
@click.option("--ssl-keyfile", type=EXISTING_FILE, help="Its private key.")
@click.option("--upstream-ca-file", type=EXISTING_FILE, help="Certificates to check https instances against.")
@click.option("--api-key-file", type=EXISTING_FILE, help="Keys that clients must send, one a line; read on change.")
@click.option("--upstream-key-file", type=EXISTING_FILE, help="Key for the instances, in place of the client's.")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Serve the status page and admin endpoints here.")
@click.option("--admin-host", default="127.0.0.1", show_default=True, help="Address of the admin port.")
@click.option("--admin-key-file", type=EXISTING_FILE, help="Keys for the admin port; needed off loopback.")
@click.option("--cors-origin", multiple=True, help="Let browsers call from this origin; * for all. Off by default.")
@click.option("--require-prefill", is_flag=True, help="Refuse rather than let decode serve alone.")
@click.option(
    "--early-decode/--no-early-decode",
    default=True,
    show_default=True,
    help="Send decode its request together with prefill, where decode can wait for the KV.",
)
@click.option("--min-prefill-tokens", default=0, type=click.IntRange(min=0), help="Shorter prompts skip prefill.")
@click.option("--retries", default=1, show_default=True, type=click.IntRange(min=0), help="Attempts after the first.")
@click.option("--max-requests-per-pair", default=256, show_default=True, type=COUNT, help="In flight on one pair.")
@click.option("--max-prefills-per-pair", default=64, show_default=True, type=COUNT, help="Prefill legs in flight.")
@click.option(
    "--max-kv-tokens-per-pair", default=0, type=click.IntRange(min=0), help="Prompt tokens not yet taken over."
)
@click.option("--queue", default=512, show_default=True, type=click.IntRange(min=0), help="Requests that may wait.")
@click.option("--queue-timeout", default=30.0, show_default=True, type=SECONDS, help="Seconds that one may wait.")
@click.option("--max-body-mib", default=64, show_default=True, type=COUNT, help="Largest request body.")
@click.option("--connect-timeout", default=5.0, show_default=True, type=SECONDS, help="Seconds, to an instance.")
@click.option(
    "--prefill-timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds, plus 1 per 1000 tokens."
)
@click.option("--first-byte-timeout", default=120.0, show_default=True, type=SECONDS, help="Seconds, of a stream.")
@click.option("--idle-timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds between its pieces.")
@click.option("--answer-timeout", default=3600.0, show_default=True, type=SECONDS, help="Seconds, of other answers.")
@click.option("--wedge-timeout", default=30.0, show_default=True, type=SECONDS, help="Seconds without any progress.")
@click.option("--drain-delay", default=5.0, show_default=True, type=click.FloatRange(min=0), help="After SIGTERM.")
@click.option("--drain", default=60.0, show_default=True, type=click.FloatRange(min=0), help="For what is in flight.")
@click.option("--access-log", default="-", show_default=True, metavar="FILE", help="JSON lines; - stdout, none: off.")
@click.pass_context
def proxy(ctx: click.Context, /, **options: Any) -> None:
    from mooncake_v0.proxy.core import Proxy
    from mooncake_v0.proxy.server import Bind, serve_proxy

    logging.basicConfig(
        level=logging.DEBUG if (ctx.obj or {}).get("debug") else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    # "Running on ..." is announced below; only Hypercorn's complaints are news
    logging.getLogger("mooncake_v0.proxy.hypercorn").setLevel(logging.WARNING)
    handed_in = activated_fds()
    certfile, keyfile = str(options["ssl_certfile"] or ""), str(options["ssl_keyfile"] or "")
    if keyfile and not certfile:
        raise click.UsageError("--ssl-keyfile needs --ssl-certfile")
    fd = options["listen_fd"] if options["listen_fd"] is not None else (handed_in[0] if handed_in else -1)
    bind = Bind(options["host"], options["port"], fd, certfile, keyfile)
    admin_bind = admin_address(options, handed_in)
    running = Proxy(settings_of(options), sources_of(options), access_log_of(options["access_log"]))

    def announce(url: str, admin_url: str) -> None:
        click.echo(f"listening on {url}" + (f", admin on {admin_url}" if admin_url else ""), err=True)

    run_loop(serve_proxy(running, bind, Bind(*admin_bind) if admin_bind else None, announce))


def run_loop(main: Any) -> None:
    """Run on uvloop where it is installed (it comes with vLLM's server), else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def activated_fds() -> list[int]:
    """Sockets that systemd handed to this process, in the order of the unit file."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    return [FIRST_ACTIVATED_FD + i for i in range(int(os.environ.get("LISTEN_FDS", "0")))]


def admin_address(options: dict[str, Any], handed_in: list[int]) -> tuple[str, int, int] | None:
    """Host, port and socket of the admin application, if there is to be one."""
    host, port = options["admin_host"], options["admin_port"]
    if port is None:
        return None
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and options["admin_key_file"] is None:
        raise click.UsageError(f"--admin-host {host} is reachable from elsewhere: give --admin-key-file too")
    return host, port, handed_in[1] if len(handed_in) > 1 else -1


def settings_of(options: dict[str, Any]) -> ProxySettings:
    from mooncake_v0.proxy.keys import read_key_file
    from mooncake_v0.proxy.settings import MIB, Limits, ProxySettings, Timeouts

    key_file = options["upstream_key_file"]
    return ProxySettings(
        timeouts=Timeouts(
            connect_s=options["connect_timeout"],
            prefill_s=options["prefill_timeout"],
            decode_first_byte_s=options["first_byte_timeout"],
            decode_idle_s=options["idle_timeout"],
            decode_json_s=options["answer_timeout"],
            wedge_s=options["wedge_timeout"],
        ),
        limits=Limits(
            pair_requests=options["max_requests_per_pair"],
            pair_prefills=options["max_prefills_per_pair"],
            pair_kv_tokens=options["max_kv_tokens_per_pair"],
            queue_requests=options["queue"],
            queue_s=options["queue_timeout"],
            body_bytes=options["max_body_mib"] * MIB,
        ),
        require_prefill=options["require_prefill"],
        min_prefill_tokens=options["min_prefill_tokens"],
        early_decode=options["early_decode"],
        retries=options["retries"],
        upstream_key=read_key_file(key_file)[0] if key_file else "",
        cors_origins=tuple(options["cors_origin"]),
        ca_file=str(options["upstream_ca_file"] or ""),
        drain_delay_s=options["drain_delay"],
        drain_s=options["drain"],
    )


def sources_of(options: dict[str, Any]) -> Sources:
    """Exactly one of the four ways to name pairs. A file is read once here, so that a bad one stops the start."""
    from mooncake_v0.metadata.store import open_store
    from mooncake_v0.metadata.store_url import parse_store_url
    from mooncake_v0.proxy import core, pair_source
    from mooncake_v0.proxy.keys import read_key_file

    ways = [bool(options["prefill"] or options["decode"]), *(bool(options[k]) for k in ("pair", "pairs", "discover"))]
    if sum(ways) != 1:
        raise click.UsageError("name the instances in one way: --prefill and --decode, --pair, --pairs or --discover")
    keys = {"client_key_file": options["api_key_file"], "admin_key_file": options["admin_key_file"]}
    if options["pairs"]:
        source = pair_source.FileSource(options["pairs"])
        source.read()
        return core.Sources(followed=source, **keys)
    if options["discover"]:
        url, token_file = options["discover"], options["discover_token_file"]
        parse_store_url(url)
        token = read_key_file(token_file)[0] if token_file else None
        store = pair_source.StoreSource(lambda: open_store(url, token=token))
        return core.Sources(followed=store, follow_every_s=core.FOLLOW_STORE_S, keep_alive_pairs=True, **keys)
    return core.Sources(pairs=pair_source.check_pairs(pairs_of(options)), **keys)


def pairs_of(options: dict[str, Any]) -> list[PairSpec]:
    from mooncake_v0.proxy.settings import PairSpec

    if not options["pair"]:
        if not (options["prefill"] and options["decode"]):
            raise click.UsageError("--prefill and --decode go together")
        return [PairSpec("pair-0", options["prefill"], options["decode"])]
    pairs = []
    for index, text in enumerate(options["pair"]):
        prefill, comma, decode = text.partition(",")
        if not comma:
            raise click.UsageError(f"--pair {text!r} is not PREFILL_URL,DECODE_URL")
        pairs.append(PairSpec(f"pair-{index}", prefill.strip(), decode.strip()))
    return pairs


def access_log_of(where: str) -> AccessLog:
    from mooncake_v0.proxy.access_log import AccessLog

    if where == "none":
        return AccessLog(None)
    if where == "-":
        return AccessLog(sys.stdout)
    try:
        return AccessLog(None, where)
    except OSError as error:
        raise ProxyError(f"cannot write the access log {where!r}: {error.strerror}", fix="check its folder") from error
