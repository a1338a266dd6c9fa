"""Measuring what a handoff costs: `mooncake-v0 bench transfer` (bytes) and `mooncake-v0 bench serve` (latencies).

Data out, no prints: `cli.bench_transfer` and `cli.bench_serve` put the parts together and show the results.

    transfer   the sweep over prompt lengths, interleaved with its limits; starts `worker` twice and `upstream_peer` twice
    worker     a producer or a consumer in a process of its own
    child      a process of the benchmark and the talk with it
    shapes     KV caches by a model's name; transports: what `--transport` may ask for; upstream: runs `upstream_peer`
    serve      the same prompts to a pair and to one plain instance, by `client`; sums them up with `latency`
    plot, page the results as PNG, and as one self-contained HTML page
"""
