"""Runs a real Chromium, and `tests/ui/fleet.py` as a process."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.parts import ROOT, require_part
from tests.patience import PATIENCE_S

ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
).split()
"""No sandbox, because CI runs as root, and no features that use the network."""
SERIOUS = ("serious", "critical")
expect.set_options(timeout=1000 * PATIENCE_S)


def chromium_path() -> str:
    """Returns the path of Chromium. Skips the test if there is none."""
    return str(require_part("chromium"))


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts a browser with an empty profile."""
    path = chromium_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, headless=True, args=ARGUMENTS, timeout=1000 * PATIENCE_S
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass  # Without slots: Playwright sets attributes.
class Watched:
    """A page with its console errors and requested URLs."""

    page: Page
    problems: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def watch(self) -> "Watched":
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        return self

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)


@contextmanager
def watched_page(browser: Browser, **options: Any) -> Iterator[Watched]:
    """Opens a page in a new context. Fails if its console has an error or warning, or if a request goes to another host than the frontend."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
    context.set_default_timeout(1000 * PATIENCE_S)
    watched = Watched(context.new_page()).watch()
    try:
        yield watched
        assert watched.problems == []
        assert [url for url in watched.urls if not url.startswith(("http://127.0.0.1:", "http://localhost:"))] == []
    finally:
        context.close()


def load_axe(page: Page) -> None:
    """Loads axe-core into the page through the browser's debugger, which does not change the page's security policy."""
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))


def serious_findings(page: Page, *rules: str) -> list[Mapping[str, Any]]:
    """Returns the serious findings of axe-core, or of these rules of it, on the page in its present state."""
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found = page.evaluate("options => axe.run(document, options)", options)
    return [
        {"id": each["id"], "help": each["help"], "nodes": [node["html"][:120] for node in each["nodes"][:3]]}
        for each in found["violations"]
        if each["impact"] in SERIOUS
    ]


@dataclass(slots=True)
class FleetProcess:
    """A running `tests/ui/fleet.py`."""

    url: str
    process: "subprocess.Popen[str]"

    def send(self, line: str) -> None:
        """Sends a line, and waits until the process has handled it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def running_fleet(directory: Path) -> Iterator[FleetProcess]:
    """Starts the process. It ends when its standard input closes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ui.fleet", str(directory)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, "the fleet did not start"
        yield FleetProcess(url, process)
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
