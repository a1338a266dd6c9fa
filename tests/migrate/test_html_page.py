"""The HTML report in a real headless browser: offline, quiet, filtered, copied, printed, on a phone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.migrate.checks import SEVERITIES
from mooncake_v0.migrate.render import render
from tests.migrate.deployments import migration
from tests.migrate.webdriver import Browser

VISIBLE = (
    "return [...document.querySelectorAll('tr[data-severity]')]"
    ".filter(row => row.offsetParent !== null).map(row => row.dataset.severity)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert shutil.which("chromedriver"), "install the Debian packages of scripts/apt-packages.txt"
    with Browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture(params=["documented-shell", "removed-flags", "hostile"])
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(render(migration(request.param).report, "html"), encoding="utf-8")
    return path


def removed_flags(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(render(migration("removed-flags").report, "html"), encoding="utf-8")
    return path


def test_page_renders_offline_without_console_errors(browser: Browser, page: Path) -> None:
    browser.log("browser")
    browser.log("performance")
    browser.open(page)
    assert browser.run("return document.querySelector('h1').textContent").startswith("Moving to vLLM 0.33.0")
    assert browser.log("browser") == []
    asked = browser.requests()
    assert page.resolve().as_uri() in asked
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_nothing_of_a_hostile_input_becomes_markup_or_script(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render(migration("hostile").report, "html"), encoding="utf-8")
    browser.open(path)
    assert browser.run("return document.title") != "pwned"
    assert browser.run("return document.querySelectorAll('script').length") == 1
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.run('return document.body.textContent.includes("<img src=x onerror=alert(1)>")')


@pytest.mark.parametrize("severity", SEVERITIES)
def test_filter_hides_and_shows_the_rows_of_its_severity(browser: Browser, tmp_path: Path, severity: str) -> None:
    browser.open(removed_flags(tmp_path))
    before = browser.run(VISIBLE)
    browser.click(f"input[data-severity={severity}]")
    hidden = browser.run(VISIBLE)
    browser.click(f"input[data-severity={severity}]")
    assert hidden == [row for row in before if row != severity]
    assert browser.run(VISIBLE) == before
    assert {"change", "silent", "info"} <= set(before)


def test_copy_button_copies_the_command_and_says_so(browser: Browser, tmp_path: Path) -> None:
    browser.open(removed_flags(tmp_path))
    browser.run(
        "window.copied = []; document.addEventListener('copy', () => window.copied.push(String(getSelection()) || "
        "document.activeElement.value));"
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => window.copied.push(t)}});"
    )
    browser.click("button[data-copy]")
    shown = browser.run("return document.querySelector('button[data-copy]').previousElementSibling.textContent")
    assert shown.startswith("VLLM_HOST_IP=192.168.0.137")
    assert browser.run("return window.copied") == [shown]
    assert browser.run("return document.querySelector('button[data-copy]').textContent") == "Copied"


def test_page_prints_to_pdf(browser: Browser, page: Path) -> None:
    browser.open(page)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF-")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type /Page/") >= 2
    assert len(pdf) > 20_000


def test_page_fits_a_phone_without_scrolling_sideways(browser: Browser, page: Path) -> None:
    browser.emulate(390, 844)
    browser.open(page)
    widths = browser.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1] <= 390
    browser.emulate(1200, 900)


def test_every_link_of_the_page_leads_to_a_section(browser: Browser, page: Path) -> None:
    browser.open(page)
    missing = browser.run(
        "return [...document.querySelectorAll('nav a')].filter(a => !document.getElementById(a.hash.slice(1))).length"
    )
    assert missing == 0
