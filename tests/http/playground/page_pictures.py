"""Draws docs/pictures: the page and ``/docs``, wide and narrow, light and dark; plan and doctor.

`nox -s pictures` runs it where Chromium is on PATH.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from playwright.sync_api import Browser, Page

from src.core.settings import CHECKOUT
from tests.http.playground.browsing import answered, ask, demo_server, open_browser
from tests.http.playground.terminal_pictures import draw_commands
from tests.http.processes import ServerProcess

PICTURES = CHECKOUT / "docs" / "pictures"
ADMIN = "sk-of-the-pictures"
SIZES = {"wide": (1280, 800), "narrow": (390, 844)}
SCHEMES = ("light", "dark")
STREAMS = 5
MAX_BYTES = 250_000


def main() -> None:
    """Draw all pictures, and say how large each is."""
    PICTURES.mkdir(exist_ok=True)
    with open_browser() as browser:
        draw_commands(browser, PICTURES)
    with demo_server(SLIPSTREAM_HTTP__ADMIN_KEY=ADMIN) as server, open_browser() as browser:
        server.wait_ready()
        for size in SIZES:
            for scheme in SCHEMES:
                page = open_page(browser, server, size, scheme)
                with others(server):
                    draw_page(page, f"page-{size}-{scheme}")
                page.goto(f"{server.url}/docs")
                draw_docs(page, f"docs-{size}-{scheme}")
                page.context.close()
    for path in sorted(PICTURES.glob("*.png")):
        size_of = path.stat().st_size
        print(f"{path.name}: {size_of:,} bytes")
        assert size_of < MAX_BYTES


def open_page(browser: Browser, server: ServerProcess, size: str, scheme: str) -> Page:
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=size == "narrow",
    )
    page = context.new_page()
    settings = json.dumps({"temperature": "0"})
    keys = json.dumps({"api": "", "admin": ADMIN})
    page.add_init_script(
        f"localStorage['slipstream.settings'] = {json.dumps(settings)};"
        f"sessionStorage['slipstream.keys'] = {json.dumps(keys)}"
    )
    page.goto(server.url)
    page.wait_for_function("() => document.querySelector('#model').value === 'demo'")
    return page


def draw_page(page: Page, name: str) -> None:
    ask(page, "Sort these words: pear, apple, plum, fig.")
    answered(page)
    page.check("#colours")
    ask(page, "Tell me a story about a fox.")
    answered(page, 2)
    # A second for the panel to see it.
    page.wait_for_timeout(1500)
    if "wide" in name:
        page.locator(".tokens .token").nth(5).hover()
        page.wait_for_timeout(200)
    page.screenshot(path=PICTURES / f"{name}.png")
    if "narrow" in name:
        page.click("#engine-button")
        page.wait_for_timeout(1500)
        page.screenshot(path=PICTURES / f"{name.replace('page', 'engine')}.png")


def draw_docs(page: Page, name: str) -> None:
    summary = page.locator("summary").first
    summary.click()
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=PICTURES / f"{name}.png")


@contextmanager
def others(server: ServerProcess) -> Iterator[None]:
    """Other clients, so that the panel has something to show."""
    over = threading.Event()
    body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}

    def stream() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not over.is_set():
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for _ in answer.iter_lines():
                        if over.is_set():
                            break

    threads = [threading.Thread(target=stream) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
