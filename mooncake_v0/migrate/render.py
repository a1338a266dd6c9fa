"""Words a `Report` as text, Markdown, HTML or JSON. Called by the command line; templates are in `templates/`.

HTML is one self-contained page: no network, filters by severity, copy buttons, prints. Everything from the input is
escaped for the format it goes into.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap

import jinja2

from mooncake_v0.migrate.report import Report

FORMATS = ("md", "html", "json", "text")
SEVERITY_WORDS = {
    "blocker": "blocks",
    "change": "needs your action",
    "silent": "changes by itself",
    "info": "good to know",
}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")


def render(report: Report, form: str) -> str:
    """The report in one of `FORMATS`, ending in a line feed."""
    if form == "json":
        return json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n"
    template = _environment(html=form == "html").get_template(f"report.{form}.j2")
    text = template.render(report=report, counts=_counts(report), words=SEVERITY_WORDS)
    return text.rstrip() + "\n"


def _counts(report: Report) -> dict[str, int]:
    return {word: sum(finding.severity == word for finding in report.findings) for word in SEVERITY_WORDS}


@functools.cache
def _environment(*, html: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mooncake_v0.migrate", "templates"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(cell=_cell, code=_code, fence=_fence, wrap=_wrap, line=_line, folded=_folded)
    return environment


def _line(text: object) -> str:
    """One line, without control characters that a terminal would act on."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", str(text)).strip()


def _cell(text: object) -> str:
    """Text for Markdown prose or a table cell: nothing in it is markup."""
    return _MARKDOWN.sub(r"\\\1", _line(text))


def _code(text: object) -> str:
    """Inline code for Markdown, also in a table: as many backticks as it takes, pipes escaped."""
    line = _line(text)
    if not line:
        return "-"
    ticks = "`" * (max([len(run) for run in re.findall(r"`+", line)], default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}".replace("|", "\\|")


def _fence(text: object) -> str:
    """A fenced block that its content cannot close."""
    content = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", str(text))
    ticks = "`" * max(3, max([len(run) for run in re.findall(r"`+", content)], default=0) + 1)
    return f"{ticks}text\n{content}\n{ticks}"


def _wrap(text: object, indent: str = "") -> str:
    """Prose for the text format, at 100 columns; long words such as commands are not broken."""
    rest = " " * len(indent) + ("" if indent.endswith("- ") else "  ")
    return textwrap.fill(
        _line(text), 100, initial_indent=indent, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _folded(command: object) -> str:
    """A command over several lines, one flag a line, as people write it."""
    words = re.findall(r"""(?:'[^']*'|"[^"]*"|[^\s'"]+)+""", _line(command))
    lines = [""]
    for word in words:
        if re.match(r"--|-[a-z]{2}", word) and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return " \\\n    ".join(lines)
