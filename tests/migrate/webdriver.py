"""A small client of the W3C WebDriver protocol for Debian's chromedriver, enough for the tests of the HTML report.

Starts chromedriver on a free port of loopback and one headless chromium with its own profile; both end with the session.
"""

from __future__ import annotations

import base64
import json
import os
import re
import selectors
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 60
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    # a page that asks for anything outside fails at once, and the log says so
    "--proxy-server=127.0.0.1:9",
)


class Browser:
    """One browser with one window; use as a context manager."""

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 900):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.base = f"http://127.0.0.1:{self._port()}"
        arguments = [*_ARGUMENTS, f"--window-size={width},{height}", f"--user-data-dir={profile}"]
        options = {"args": arguments, "prefs": {"profile.managed_default_content_settings.popups": 2}}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{answer['sessionId']}"

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._send("DELETE", self.session)
        finally:
            self.driver.terminate()
            self.driver.wait(timeout=DEADLINE_S)
            assert self.driver.stdout is not None
            self.driver.stdout.close()

    def open(self, path: Path) -> None:
        self._send("POST", f"{self.session}/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function body returns in the page."""
        return self._send("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        found = self._send("POST", f"{self.session}/element", {"using": "css selector", "value": selector})
        self._send("POST", f"{self.session}/element/{next(iter(found.values()))}/click", {})

    def emulate(self, width: int, height: int) -> None:
        """A phone's screen; the window of a desktop does not get that narrow."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._send("POST", f"{self.session}/goog/cdp/execute", command)

    def pdf(self) -> bytes:
        return base64.b64decode(self._send("POST", f"{self.session}/print", {}))

    def screenshot(self) -> bytes:
        return base64.b64decode(self._send("GET", f"{self.session}/screenshot"))

    def log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self._send("POST", f"{self.session}/se/log", {"type": kind})
        return entries

    def requests(self) -> list[str]:
        """URLs that pages from files asked for, of any scheme; chromium's own start page is not meant."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent if params["documentURL"].startswith("file:")]

    def _port(self) -> int:
        assert self.driver.stdout is not None
        end = time.monotonic() + DEADLINE_S
        said = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.driver.stdout, selectors.EVENT_READ)
            while time.monotonic() < end and selector.select(end - time.monotonic()):
                # not readline: its buffer would hold lines that select does not see
                chunk = os.read(self.driver.stdout.fileno(), 4096)
                said += chunk
                match = re.search(rb"started successfully on port (\d+)", said)
                if match:
                    return int(match[1])
                if not chunk:
                    break
        self.driver.kill()
        raise RuntimeError(f"chromedriver did not start: {said.decode(errors='replace')}")

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)["value"]
