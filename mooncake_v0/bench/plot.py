"""Charts of both benchmarks with matplotlib (extra `bench`). Figures in, files or SVG text out; no display is needed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from mooncake_v0.bench.serve_report import ServeReport, SweepPoint
from mooncake_v0.bench.transfer_report import Report, Row

DPI = 144
_PANELS = (("ttft_ms", "TTFT, ms"), ("itl_ms", "ITL, ms"), ("tokens_per_s", "output tokens/s"))
_COLOURS = ("#0b6e99", "#b35309", "#4c7a34", "#7b4b94", "#6b7280")


def draw_transfer(report: Report, path: Path) -> None:
    """GB/s by size: ours, cache to cache, and the limits."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for at, transport in enumerate(dict.fromkeys(row.transport for row in report.rows)):
        _plot_rows(axes, report.rows, transport, f"transfer, {transport}", _COLOURS[at], "-")
        _plot_rows(axes, report.cache_to_cache, transport, f"cache to cache, {transport}", _COLOURS[at], "--")
    limits = sorted(report.limit_rows, key=lambda row: int(row["kv_bytes"]))
    sizes = [row["kv_bytes"] / 2**20 for row in limits]
    axes.plot(sizes, [row["engine_gb_per_s"] for row in limits], ":", color="#222222", label="raw engine, one read")
    axes.plot(sizes, [row["memcpy_gb_per_s"] for row in limits], "-.", color="#888888", label="memcpy")
    timed = [row for row in limits if row["upstream_ms"]]
    if timed:
        rates = [row["kv_bytes"] / row["upstream_ms"] / 1e6 for row in timed]
        axes.plot([row["kv_bytes"] / 2**20 for row in timed], rates, "x-", color="#b91c1c", label="upstream's pipe")
    axes.set(xscale="log", yscale="log", xticks=sizes, xlabel="KV cache of the prompt, MiB", ylabel="GB/s")
    axes.set_title(f"Handoff of {report.run['model_shape']} on {report.run['device']}, {report.run['network']}")
    _finish(axes)
    figure.savefig(path, dpi=DPI, format="png")


def draw_serve(report: ServeReport, path: Path) -> None:
    figure = serve_figure(report)
    figure.savefig(path, dpi=DPI, format="png")


def serve_svg(report: ServeReport) -> str:
    """The same chart as an <svg> element, to be put into a page."""
    buffer = io.StringIO()
    serve_figure(report).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def serve_figure(report: ServeReport) -> Figure:
    """One row of panels a sweep: TTFT, ITL and throughput, pair and plain instance."""
    sweeps = [
        (report.prompt_sweep, "prompt_tokens", "prompt, tokens", "one request at a time"),
        (report.rate_sweep, "requests_per_s", "offered requests/s", "requests at random times"),
    ]
    drawn = [sweep for sweep in sweeps if sweep[0]]
    figure = Figure(figsize=(12, 3.8 * max(1, len(drawn))), layout="constrained")
    grid = figure.subplots(max(1, len(drawn)), len(_PANELS), squeeze=False)
    for panels, (points, name, label, title) in zip(grid, drawn):
        panels[0].set_title(title, loc="left")
        for axes, (metric, text) in zip(panels, _PANELS):
            _plot_points(axes, points, name, metric)
            axes.set(xlabel=label, ylabel=text)
            _finish(axes)
    return figure


def _plot_rows(axes: Axes, rows: Sequence[Row], transport: str, label: str, colour: str, style: str) -> None:
    chosen = [row for row in rows if row.transport == transport]
    sizes = [row.kv_bytes / 2**20 for row in chosen]
    axes.plot(sizes, [row.gb_per_s for row in chosen], f"o{style}", color=colour, label=label)


def _plot_points(axes: Axes, points: Sequence[SweepPoint], name: str, metric: str) -> None:
    x = [getattr(point, name) for point in points]
    for at, (side, name_of_side) in enumerate((("proxy", "pair"), ("plain", "plain"))):
        figures: list[Any] = [getattr(point, side) for point in points]
        if metric == "tokens_per_s":
            axes.plot(x, [one.tokens_per_s for one in figures], "o-", color=_COLOURS[at], label=name_of_side)
            continue
        latencies = [getattr(one, metric) for one in figures]
        axes.plot(x, [one.p50 for one in latencies], "o-", color=_COLOURS[at], label=f"{name_of_side}, median")
        axes.plot(x, [one.p99 for one in latencies], "^:", color=_COLOURS[at], label=f"{name_of_side}, p99")
    wide = len(x) > 1 and max(x) / min(x) >= 8
    if wide:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x)
    if wide and metric == "ttft_ms":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _finish(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
