"""The pinned pair under mixed load while its processes and its network fail.

    python -m tests.soak.chaos --seconds 1800 --seed 7 [--json result.json]

Producer and consumer run in two network namespaces that a cable of the soak joins; metadata server, proxy and clients are
on decode's side. 32 clients send prompts of 1 to 3,000 tokens through the real proxy, streamed and not, and some leave at
a random moment. Meanwhile, in an order drawn from the seed: kill -9 and SIGSTOP of agents, instances, engine processes
and the metadata server; the cable is cut, delays and loses packets. The soak restarts what has died, as a supervisor does.

It passes (exit code 0) when every completed answer equals that of one plain instance, no request failed except while the
only decode instance was away, none waited past its deadline; and when afterwards the hit rate of fresh prompts is above
95 % and memory, descriptors, processes, shared memory and metadata keys are what they were. Exit code 1: it did not.
Needs root or user namespaces, iproute2 and /dev/net/tun; where they are missing it says so and runs on loopback
without faults of the network. Nothing is left behind, also after Ctrl-C or a kill.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Sequence

from tests.soak.chaos.asks import fetch_reference, write_reference
from tests.soak.chaos.isolation import start_isolated, wait_isolated, why_not_isolated
from tests.soak.chaos.soak import bodies_of, make_model, run


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="of chaos; starting and measuring come on top")
    parser.add_argument("--seed", type=int, default=7, help="of prompts, faults and packet loss")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=200, help="different ones in the load")
    parser.add_argument("--fresh", type=int, default=60, help="new prompts in a round after the chaos")
    parser.add_argument(
        "--instance-kills",
        type=int,
        default=1_000_000,
        metavar="N",
        help="at most so many, which come first; each costs a start",
    )
    parser.add_argument("--plain-url", help="a plain instance that serves the same model, instead of starting one")
    parser.add_argument("--loopback", action="store_true", help="no namespaces and no faults of the network")
    parser.add_argument("--folder", help="for logs; kept")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--reference", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.inside:
        return run(options, isolated=True)
    why_not = "--loopback" if options.loopback else why_not_isolated()
    if why_not:
        print(f"no namespaces ({why_not}): everything is on loopback and the network has no faults", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.json"
        inner = [*arguments, "--inside"] + (["--reference", str(reference)] if options.plain_url else [])
        isolated = None if why_not else start_isolated("tests.soak.chaos", inner)
        if options.plain_url:
            load, fresh = bodies_of(options, make_model())
            write_reference(reference, fetch_reference(options.plain_url, [*load, *fresh]))
            options.reference = str(reference)
        return run(options, isolated=False) if isolated is None else wait_isolated(isolated)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
