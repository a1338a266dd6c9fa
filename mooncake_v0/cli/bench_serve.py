"""`mooncake-v0 bench serve`: the user's latency through a pair beside that of one plain instance."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import click

from mooncake_v0.cli.bench_files import (
    Numbers,
    check_plotting,
    check_writable,
    end_on_sigterm,
    progress_bar,
    write_json,
)
from mooncake_v0.cli.bench_servers import StartOptions, Status, started, status_reader

if TYPE_CHECKING:
    from mooncake_v0.bench.pace import Pace
    from mooncake_v0.bench.serve import ServeOptions
    from mooncake_v0.bench.serve_report import ServeReport, SweepPoint

HELP = """Measure TTFT, ITL, TPOT and throughput of a pair and a plain instance.

The same prompts go to both in turn, in one run, and ratios are printed. Give
the URLs of a running proxy and a running plain instance of the same model, or
let --start run a pair and a plain instance on this host.

\b
Examples:
  mooncake-v0 bench serve --start tiny --prompt-tokens 128,1024
  mooncake-v0 bench serve --proxy http://127.0.0.1:8000 \\
      --plain http://127.0.0.1:8300 --config mooncake.json
  mooncake-v0 bench serve --start ./Qwen3-8B --rates 1,2,4 \\
      --html report.html --json report.json
"""


@click.command(help=HELP)
@click.option("--proxy", "proxy_url", metavar="URL", help="A running proxy in front of a pair.")
@click.option("--plain", "plain_url", metavar="URL", help="A running instance without transfer, same model.")
@click.option("--start", "model", metavar="tiny|NAME|DIR", help="Start pair and plain instance for this model.")
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1, 16), help="With --start.")
@click.option("--kv-buffer-size", metavar="SIZE", help="With --start.  [default: 8 of the longest prompts]")
@click.option("--vllm-arg", "vllm_args", multiple=True, metavar="ARG", help="With --start: for all three instances.")
@click.option("--prefill-gpus", metavar="LIST", help="With --start: CUDA_VISIBLE_DEVICES of prefill, such as 0.")
@click.option("--decode-gpus", metavar="LIST", help="With --start: of decode and the plain instance, such as 1.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="mooncake.json of the running pair: reports what decode received.",
)
@click.option(
    "--prompt-tokens",
    type=Numbers(int, 1_000_000),
    help="Prompt lengths.  [default: 128 to 32768, as far as the model takes them]",
)
@click.option("--requests", type=click.IntRange(1, 10_000), default=8, show_default=True, help="For each length.")
@click.option("--output-tokens", type=click.IntRange(2, 100_000), default=32, show_default=True)
@click.option(
    "--rates", metavar="R,R,…|none", default="0.5,1,2", show_default=True, help="Requests a second, for the rate sweep."
)
@click.option("--rate-prompt-tokens", type=click.IntRange(1, 1_000_000), default=1024, show_default=True)
@click.option("--rate-requests", type=click.IntRange(2, 100_000), default=16, show_default=True, help="For each rate.")
@click.option(
    "--pace-prompt-tokens",
    type=click.IntRange(1, 1_000_000),
    help="Also measure the ITL of streams while prompts of this length keep arriving, such as 16384.",
)
@click.option(
    "--pace-output-tokens",
    type=click.IntRange(2, 100_000),
    default=512,
    show_default=True,
    help="Of each of these streams.",
)
@click.option(
    "--seed", type=int, help="Of prompts and arrivals; a seed used before finds its prompts cached.  [default: random]"
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(1, 3600), default=300, show_default=True, help="Of one request, s."
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token to both.  [env: OPENAI_API_KEY]")
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the report to this file too.")
@click.option("--png", "png_path", type=click.Path(path_type=Path), help="Write charts to this file.")
@click.option(
    "--html", "html_path", type=click.Path(path_type=Path), help="Write one self-contained page to this file."
)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="With --start: keep the logs here.")
def serve(
    proxy_url: str | None,
    plain_url: str | None,
    model: str | None,
    tp: int,
    kv_buffer_size: str | None,
    vllm_args: tuple[str, ...],
    prefill_gpus: str | None,
    decode_gpus: str | None,
    config_path: Path | None,
    prompt_tokens: tuple[int, ...] | None,
    requests: int,
    output_tokens: int,
    rates: str,
    rate_prompt_tokens: int,
    rate_requests: int,
    pace_prompt_tokens: int | None,
    pace_output_tokens: int,
    seed: int | None,
    timeout_s: float,
    api_key: str | None,
    output: str,
    json_path: Path | None,
    png_path: Path | None,
    html_path: Path | None,
    folder: Path | None,
) -> int:
    if (model is None) == (proxy_url is None or plain_url is None) or (model and (proxy_url or plain_url)):
        raise click.UsageError("give --proxy URL and --plain URL of running servers, or --start MODEL")
    check_plotting(bool(png_path or html_path))
    for path in (json_path, png_path, html_path):
        check_writable(path)

    from mooncake_v0.bench.serve import ServeOptions

    options = ServeOptions(
        proxy_url or "",
        plain_url or "",
        prompt_tokens,
        output_tokens,
        requests,
        _rates(rates),
        rate_prompt_tokens,
        rate_requests,
        secrets.randbelow(1 << 31) if seed is None else seed,
        timeout_s,
        api_key,
        pace_prompt_tokens,
        pace_output_tokens,
    )
    end_on_sigterm()
    with contextlib.ExitStack() as stack:
        if model is None:
            counters = status_reader(config_path)
        else:
            start = StartOptions(model, tp, kv_buffer_size, vllm_args, folder, prefill_gpus, decode_gpus)
            options, counters = stack.enter_context(started(start, options))
        report = _measure(options, counters)
    _write(report, json_path, png_path, html_path)
    click.echo(json.dumps(report.as_dict(), indent=2) if output == "json" else _text(report))
    return 1 if _wrong(report) else 0


def _rates(text: str) -> tuple[float, ...]:
    if text == "none":
        return ()
    numbers: tuple[float, ...] = Numbers(float, 100_000).convert(text, None, None)
    return numbers


def _measure(options: ServeOptions, counters: Status) -> ServeReport:
    from mooncake_v0.bench.serve import measure
    from mooncake_v0.bench.serve_report import ServeReport

    before = counters()
    with progress_bar() as show:
        sweeps = asyncio.run(measure(options, show))
    after = counters()
    transferred = None
    if before is not None and after is not None:
        transferred = {name: value - before.get(name, 0.0) for name, value in sorted(after.items())}
    return ServeReport(sweeps.prompt_sweep, sweeps.rate_sweep, sweeps.pace, transferred, sweeps.run, sweeps.notes)


def _write(report: ServeReport, json_path: Path | None, png_path: Path | None, html_path: Path | None) -> None:
    write_json(json_path, report.as_dict())
    if png_path is not None:
        from mooncake_v0.bench.plot import draw_serve

        draw_serve(report, png_path)
    if html_path is not None:
        from mooncake_v0.bench.page import render_page

        html_path.write_text(render_page(report), encoding="utf-8")


def _text(report: ServeReport) -> str:
    run: dict[str, Any] = report.run
    lines = [f"{run['model']}: {run['output_tokens']} output tokens, {run['cpus']} CPUs, seed {run['seed']}"]
    if report.prompt_sweep:
        lines += ["", "by prompt length, one request at a time", *_table("tokens", report.prompt_sweep)]
    if report.rate_sweep:
        title = f"by request rate, prompts of {report.rate_sweep[0].prompt_tokens} tokens"
        lines += ["", title, *_table("req/s", report.rate_sweep)]
    if report.pace is not None:
        lines += ["", *_pace(report.pace)]
    lines.append("")
    if report.transferred is not None:
        hits = report.transferred.get("hits", 0.0)
        misses = sum(value for name, value in report.transferred.items() if name.startswith("miss_"))
        lines.append(f"decode skipped the prefill of {hits:.0f} of {hits + misses:.0f} prompts")
    points = (*report.prompt_sweep, *report.rate_sweep)
    for name, sides in (("the pair", [p.proxy for p in points]), ("plain", [p.plain for p in points])):
        incomplete = sum(side.incomplete for side in sides)
        if incomplete:
            lines.append(f"{incomplete} streams from {name} lost tokens (vllm 0.6.4.post1 can, its pull request 10802)")
    lines += [*_wrong(report), *report.notes]
    return "\n".join(lines)


def _table(first: str, points: Sequence[SweepPoint]) -> list[str]:
    """The pair's figure and its ratio to the plain instance's."""
    lines = [f"{first:>7}  TTFT p50 ms       p99   ITL p50 ms       p99      TPOT ms       tokens/s"]
    for point in points:
        name = point.prompt_tokens if point.requests_per_s is None else point.requests_per_s
        ours, theirs, ratio = point.proxy, point.plain, point.ratio
        lines.append(
            f"{name:>7g} {ours.ttft_ms.p50:>6.1f} {_times(ratio.ttft)} {ours.ttft_ms.p99:>9.1f}"
            f" {ours.itl_ms.p50:>6.1f} {_times(ratio.itl_p50)} {ours.itl_ms.p99:>9.1f}"
            f" {ours.tpot_ms.p50:>6.1f} {_times(ratio.tpot)} {ours.tokens_per_s:>8.1f} {_times(ratio.tokens_per_s)}"
        )
        lines.append(
            f"{'plain':>7} {theirs.ttft_ms.p50:>6.1f} {'':>6} {theirs.ttft_ms.p99:>8.1f}"
            f" {theirs.itl_ms.p50:>6.1f} {'':>6} {theirs.itl_ms.p99:>8.1f}"
            f" {theirs.tpot_ms.p50:>6.1f} {'':>6} {theirs.tokens_per_s:>8.1f}"
        )
    return lines


def _pace(pace: Pace) -> list[str]:
    lines = [f"ITL of {pace.streams} streams, ms, alone and while prompts of {pace.prompt_tokens} tokens keep arriving"]
    lines.append("         alone p50       p99   arrivals p50       p99   p99 ratio   prompts")
    for name, side in (("the pair", pace.proxy), ("plain", pace.plain)):
        lines.append(
            f"{name:>8} {side.alone.p50:>9.1f} {side.alone.p99:>9.1f} {side.arrivals.p50:>14.1f} {side.arrivals.p99:>9.1f}"
            f" {side.ratio_p99:>10.2f}x {side.prompts:>9}"
        )
    return lines


def _times(ratio: float | None) -> str:
    return f"{'-' if ratio is None else f'{ratio:.2f}x':>6}"


def _wrong(report: ServeReport) -> list[str]:
    """What makes the figures worthless: other answers, or none. Under load batches differ, and with them roundings."""
    wrong = []
    for point in report.prompt_sweep:
        if point.equal_answers < point.compared_answers:
            differing = point.compared_answers - point.equal_answers
            wrong.append(f"{point.prompt_tokens} tokens: {differing} answers differ from the plain instance's")
    for point in report.rate_sweep:
        for name, side in (("the pair", point.proxy), ("the plain instance", point.plain)):
            if side.failed:
                wrong.append(
                    f"{point.requests_per_s:g} requests/s: {side.failed} of {side.requests} requests to {name} failed: "
                    f"{side.first_error}"
                )
    return wrong
