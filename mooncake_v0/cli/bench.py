"""`mooncake-v0 bench`: what the handoff costs, in bytes a second and in the user's latency."""

from __future__ import annotations

import click

from mooncake_v0.cli.bench_serve import serve
from mooncake_v0.cli.bench_transfer import transfer


@click.group(commands={"transfer": transfer, "serve": serve})
def bench() -> None:
    """Measure the transfer of KV caches and the latency of a pair.

    Every figure is measured beside what it is compared with, in the same run:
    the transfer beside the raw engine, memcpy and upstream's own pipe; the
    pair beside one plain instance.
    """
