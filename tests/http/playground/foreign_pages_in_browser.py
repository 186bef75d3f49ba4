"""Pages of other origins in a real Chromium, which try to use a server of the demo model.

Not collected with the other tests: `nox -s page` runs it where Chromium is on PATH.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.http.playground.browsing import answered, ask, demo_server, open_browser
from tests.http.processes import ServerProcess
from tests.support.adapters import make_adapter
from tests.support.checkpoints import load_reference

pytestmark = pytest.mark.timeout(240)

DEMO = Path(__file__).parents[3] / "configs" / "demo"
# The browser finds these on this machine, as an attacker's name server would have it.
EVIL, PROXY = "evil.example", "chat.example"
HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
COMPUTED = 'vllm:prompt_tokens_total{engine="0"'
REFUSED = 'slipstream_http_rejections_total{reason="foreign_origin"'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser("--host-resolver-rules=MAP *.example 127.0.0.1") as browser:
        yield browser


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of a server of empty pages."""

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<!doctype html><title>a page</title><p>Nothing to see here."
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, elsewhere: int) -> Iterator[ServerProcess]:
    """Without keys, with adapters to load; pages of `friend.example` may use it."""
    settings = {
        "SLIPSTREAM_LORA__DIRECTORIES": str(adapters(tmp_path_factory.mktemp("adapters"))),
        "SLIPSTREAM_HTTP__CORS_ORIGINS": f"http://friend.example:{elsewhere}",
    }
    with demo_server(**settings) as server:
        server.wait_ready()
        yield server


def adapters(folder: Path) -> Path:
    make_adapter(folder / "it", load_reference(DEMO))
    return folder


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    context.set_default_timeout(30_000)
    yield context.new_page()
    context.close()


def figure(server: ServerProcess, sample: str) -> float:
    """The sum of all samples that begin so."""
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(rf"^{re.escape(sample)}\S* (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def models(server: ServerProcess) -> list[str]:
    return [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]


@contextmanager
def nothing_happens(server: ServerProcess, attempts: int) -> Iterator[None]:
    """All attempts arrive; none computes, loads or leaves anything."""
    computed, refused, served = figure(server, COMPUTED), figure(server, REFUSED), models(server)
    yield
    for _ in range(100):
        if figure(server, REFUSED) >= refused + attempts:
            break
        threading.Event().wait(0.1)
    assert figure(server, REFUSED) == refused + attempts
    assert figure(server, COMPUTED) == computed
    assert figure(server, "vllm:num_requests_running") == 0
    assert models(server) == served


# Sends a body in every way in which a browser asks nobody first.
SEND = """async ([url, body]) => {
  const bytes = new TextEncoder().encode(body);
  const send = data => fetch(url, { method: 'POST', mode: 'no-cors', body: data });
  await send(bytes);
  await send(new Blob([bytes], { type: 'text/plain' }));
  await send(new Blob([bytes]));
  await send(new URLSearchParams({ body }));
  navigator.sendBeacon(url, bytes);
  navigator.sendBeacon(url, new Blob([bytes], { type: 'text/plain' }));
}"""
TRIES = 6
FORM = """([url, body, encoding]) => {
  const form = document.createElement('form');
  const field = document.createElement('input');
  // Of the encoding text/plain, name and value are joined by a sign of equality.
  [field.name, field.value] = [body.slice(0, -1) + ',"user":"', '"}'];
  Object.assign(form, { method: 'POST', action: url, enctype: encoding });
  form.append(field);
  document.body.append(form);
  form.submit();
}"""
SANDBOX = """([url, body]) => {
  const frame = document.createElement('iframe');
  frame.sandbox = 'allow-scripts';
  const code = `fetch(${JSON.stringify(url)},
    { method: 'POST', mode: 'no-cors', body: new TextEncoder().encode(${JSON.stringify(body)}) })`;
  frame.srcdoc = `<script>${code.replaceAll('</', '<\\\\/')}</script>`;
  document.body.append(frame);
}"""
BODIES = {
    "/v1/chat/completions": HELLO,
    "/v1/completions": {"model": "demo", "prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"model": "demo", "input": "Hello", "background": True},
    "/v1/messages": HELLO,
    "/tokenize": {"model": "demo", "prompt": "Hello"},
    "/v1/load_lora_adapter": {"lora_name": "it", "lora_path": "it"},
    "/v1/unload_lora_adapter": {"lora_name": "it"},
}
# By name, by port, and by both: browsers call some of these the same site.
ORIGINS = (f"http://{EVIL}", "http://127.0.0.1", "http://localhost")


def test_a_program_does_what_pages_may_not(server: ServerProcess) -> None:
    """Without a type, as a page's bytes are; so each of these bodies would have an effect."""
    for path, body in BODIES.items():
        computed = figure(server, COMPUTED)
        answer = httpx.post(server.url + path, content=json.dumps(body), timeout=60)
        assert answer.status_code == 200, answer.text
        assert ("it" in models(server)) == (path == "/v1/load_lora_adapter")
        if body.get("max_tokens"):
            assert figure(server, COMPUTED) > computed
    # What goes on in the background has to end before others count.
    for _ in range(100):
        if not figure(server, "vllm:num_requests_running"):
            break
        threading.Event().wait(0.1)


@pytest.mark.parametrize("origin", ORIGINS)
def test_no_body_of_another_page_does_anything(
    page: Page, server: ServerProcess, elsewhere: int, origin: str
) -> None:
    page.goto(f"{origin}:{elsewhere}/")
    with nothing_happens(server, TRIES * len(BODIES)):
        for path, body in BODIES.items():
            page.evaluate(SEND, [f"{server.url}{path}", json.dumps(body)])


@pytest.mark.parametrize(
    "encoding", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_no_form_does_anything(
    page: Page, server: ServerProcess, elsewhere: int, encoding: str
) -> None:
    page.goto(f"http://{EVIL}:{elsewhere}/")
    url = f"{server.url}/v1/chat/completions"
    with nothing_happens(server, 1), page.expect_navigation():
        page.evaluate(FORM, [url, json.dumps(HELLO), encoding])
    assert "http.cors_origins" in page.content()


def test_no_frame_without_an_origin_does_anything(
    page: Page, server: ServerProcess, elsewhere: int
) -> None:
    page.goto(f"http://localhost:{elsewhere}/")
    with nothing_happens(server, 1):
        page.evaluate(SANDBOX, [f"{server.url}/v1/chat/completions", json.dumps(HELLO)])


ASK = """async ([url, body]) => {
  const headers = { 'content-type': 'application/json' };
  const answer = await fetch(url, { method: 'POST', headers, body });
  return answer.json();
}"""


def test_an_allowed_page_is_answered(page: Page, server: ServerProcess, elsewhere: int) -> None:
    page.goto(f"http://friend.example:{elsewhere}/")
    said = page.evaluate(ASK, [f"{server.url}/v1/chat/completions", json.dumps(HELLO)])
    assert said["choices"][0]["message"]["content"]
    # Another page gets no further than to ask.
    page.goto(f"http://{EVIL}:{elsewhere}/")
    with pytest.raises(Exception, match="Failed to fetch"):
        page.evaluate(ASK, [f"{server.url}/v1/chat/completions", json.dumps(HELLO)])


def test_a_name_that_was_pointed_here_reads_nothing(page: Page, server: ServerProcess) -> None:
    """DNS rebinding: for the browser the page and the server are of one origin now."""
    there = f"http://{EVIL}:{server.port}"
    answer = page.goto(f"{there}/")
    assert answer is not None
    assert answer.status == 421
    assert "http.allowed_hosts" in page.content()
    computed = figure(server, COMPUTED)
    said = page.evaluate(ASK, [f"{there}/v1/chat/completions", json.dumps(HELLO)])
    assert said["error"]["code"] == "unknown_host"
    assert figure(server, COMPUTED) == computed
    told = page.evaluate("async () => (await fetch('/health')).json()")
    assert set(told) == {"phase", "progress"}


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "chat.localhost"])
def test_the_page_of_the_server_works(page: Page, server: ServerProcess, name: str) -> None:
    page.goto(f"http://{name}:{server.port}/")
    expect(page.locator("#model")).to_have_value("demo")
    ask(page, "What is 17 + 25?")
    assert answered(page)


@pytest.mark.parametrize("keeps_host", [True, False])
def test_the_page_works_behind_a_proxy(page: Page, keeps_host: bool) -> None:
    """Under a name of the proxy's, which the server answers to; or which it never hears of."""
    settings = {"SLIPSTREAM_HTTP__ALLOWED_HOSTS": PROXY} if keeps_host else {}
    with demo_server(**settings) as server:
        server.wait_ready()
        with proxy(server, keeps_host=keeps_host) as port:
            # Only to this machine do browsers without TLS say of which site a page is.
            name = PROXY if keeps_host else "chat.localhost"
            page.goto(f"http://{name}:{port}/")
            expect(page.locator("#model")).to_have_value("demo")
            ask(page, "What is 17 + 25?")
            assert answered(page)


@contextmanager
def proxy(server: ServerProcess, *, keeps_host: bool) -> Iterator[int]:
    """A reverse proxy in front of a server, on a port of its own."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            headers = {
                name: value for name, value in self.headers.items() if name.lower() != "host"
            }
            headers["host"] = self.headers["host"] if keeps_host else f"127.0.0.1:{server.port}"
            answer = httpx.request(
                self.command,
                server.url + self.path,
                content=self.rfile.read(size),
                headers=headers,
                timeout=60,
            )
            self.send_response(answer.status_code)
            dropped = ("transfer-encoding", "content-length", "content-encoding", "connection")
            for name, value in answer.headers.items():
                if name not in dropped:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    gate = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=gate.serve_forever, daemon=True).start()
    try:
        yield gate.server_address[1]
    finally:
        gate.shutdown()
        gate.server_close()
