"""A headless Chromium, and servers of the demo model for it to open."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

from tests.http.processes import ServerProcess

BINARIES = ("chromium", "chromium-browser", "google-chrome")
# Whoever starts it, its answers are the same: the demo model on one thread, uncompiled.
DEMO = {"SLIPSTREAM_COMPILE__STARTUP": "off", "SLIPSTREAM_DEVICE__NUM_THREADS": "1"}


def chromium() -> str | None:
    """The browser's path; ``None`` where there is none."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


@contextmanager
def open_browser(*arguments: str) -> Iterator[Browser]:
    """A browser, started with further arguments, which ends with the block."""
    binary = chromium()
    assert binary is not None, "Chromium is not on PATH: `apt-get install chromium`"
    # Its sandbox refuses to run as root; the only page it opens is ours.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=[*sandbox, *arguments])
        try:
            yield browser
        finally:
            browser.close()


def demo_server(port: int | None = None, **settings: str) -> ServerProcess:
    """A server of the demo model, on this port or a free one."""
    environment = {**DEMO, **settings}
    if port is None:
        return ServerProcess.hypercorn(environment)
    bind = ["--bind", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "hypercorn", "src.http:app", *bind]
    return ServerProcess(command, port, environment)


def ask(page: Page, text: str) -> None:
    """Type a question and send it."""
    page.fill("#question", text)
    page.press("#question", "Enter")


def answered(page: Page, count: int = 1) -> str:
    """The text of the newest answer, once so many of them have ended."""
    page.wait_for_function(
        "count => document.querySelectorAll('.assistant:not(.busy)').length === count", arg=count
    )
    page.wait_for_function("() => !document.body.classList.contains('answering')")
    return page.locator(".assistant .text").last.inner_text()
