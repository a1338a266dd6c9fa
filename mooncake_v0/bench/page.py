"""The report of `mooncake-v0 bench serve` as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

import jinja2
from markupsafe import Markup

from mooncake_v0.bench.plot import serve_svg
from mooncake_v0.bench.serve_report import ServeReport


def render_page(report: ServeReport) -> str:
    """The charts as inline SVG, and every figure of the report in tables."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mooncake_v0.bench", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("serve.html.j2").render(report=report, chart=Markup(serve_svg(report)))
