"""The page of `bench serve`, from a report as the sweeps make it, in a real browser."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mooncake_v0.bench.client import Answer
from mooncake_v0.bench.pace import Pace, PaceSide
from mooncake_v0.bench.page import render_page
from mooncake_v0.bench.plot import draw_serve
from mooncake_v0.bench.serve_report import ServeReport, SweepPoint, percentiles, sweep_point


def make_point(tokens: int, rate: float | None) -> SweepPoint:
    proxy = [Answer(0.0, 1.0, 0.25, (0.02,) * 3, 4, "a")] * 3
    plain = [Answer(0.0, 1.0, 0.125, (0.02,) * 3, 4, "a")] * 3
    return sweep_point(tokens, 4, rate, proxy=proxy, plain=plain, proxy_wall_s=1.0, plain_wall_s=1.0)


def make_side(arrivals_ms: float) -> PaceSide:
    return PaceSide(percentiles([6.0] * 10), percentiles([arrivals_ms] * 10), 5, arrivals_ms / 6.0)


@pytest.fixture(scope="module")
def report() -> ServeReport:
    run = {"model": "<b>tiny</b>", "started_at": "2026-01-01T00:00:00Z", "cpus": 2, "output_tokens": 4, "seed": 7}
    return ServeReport(
        (make_point(128, None), make_point(4096, None)),
        (make_point(1024, 0.5), make_point(1024, 2.0)),
        Pace(16384, 4, 512, make_side(7.5), make_side(600.0)),
        {"hits": 12.0, "miss_late": 0.0},
        run,
        ("left out: 8192 tokens",),
    )


@pytest.fixture(scope="module")
def page(report: ServeReport) -> str:
    return render_page(report)


def test_a_browser_shows_chart_and_tables(page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]

    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )

    assert "<svg" in done.stdout
    assert re.search(r'<td>250\.0</td><td>125\.0</td>\s*<td class="ratio">2\.00</td>', done.stdout)
    assert "hits: 12" in done.stdout
    assert re.search(r'<td>7\.5</td><td>7\.5</td>\s*<td class="ratio">1\.25</td><td>5</td>', done.stdout)


def test_the_page_loads_nothing(page: str) -> None:
    loading = re.findall(r"""(?:\bsrc|<link[^>]*href|xlink:href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)

    assert {target for target in loading if not target.startswith(("#", "data:"))} == set()
    assert "<script" not in page


def test_names_from_the_server_are_escaped(page: str) -> None:
    assert "&lt;b&gt;tiny&lt;/b&gt;" in page
    assert "<b>" not in page


def test_the_same_report_makes_a_png(report: ServeReport, tmp_path: Path) -> None:
    draw_serve(report, tmp_path / "s.png")

    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
