"""Web pages of other origins and under other names: they change and compute nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.cli.serve import with_own_names
from src.core.config import Config, HttpSection, Secret
from src.core.errors import ConfigError
from src.http import create_app
from src.http.server.browsers import is_foreign_page, is_known_host
from src.http.server.guard import check_access
from tests.http.asking import client_of
from tests.http.server.test_guard import OPEN, ROUTES

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

HOST = "slipstream"
OWN = f"http://{HOST}"
EVIL = "https://evil.example"
APP = "https://app.example:8443"
KEY = "sk-alice-0123456789"
PROMPT = {"prompt": "hello", "max_tokens": 2}
Headers = Sequence[tuple[str, str]] | Mapping[str, str]


def scope_of(headers: Headers, method: str = "POST", scheme: str | None = "http") -> dict[str, Any]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in pairs]
    known = {} if scheme is None else {"scheme": scheme}
    return {"type": "http", "method": method, "headers": encoded, **known}


def sent_by(origin: str | None, site: str | None = None, host: str = HOST) -> dict[str, str]:
    """The headers that a browser adds for a page of this origin."""
    given = {"host": host, "origin": origin, "sec-fetch-site": site}
    return {name: value for name, value in given.items() if value is not None}


# Who asks


@pytest.mark.parametrize(
    ("headers", "is_foreign"),
    [
        # Programs
        ({"host": HOST}, False),
        ({}, False),
        # The page of this server; the port of the scheme may be left out, or said
        (sent_by(OWN), False),
        (sent_by(OWN, "same-origin"), False),
        (sent_by(OWN, host=f"{HOST}:80"), False),
        (sent_by(f"{OWN}:80"), False),
        (sent_by("http://SlipStream"), False),
        (sent_by("http://[::1]:8000", host="[::1]:8000"), False),
        # Of a server behind a proxy that ends TLS, or writes a name of its own
        (sent_by("https://chat.example", "same-origin", host="chat.example"), False),
        (sent_by("https://chat.example", "same-origin", host="10.0.0.7:8000"), False),
        # Somebody typed the address
        (sent_by(None, "none"), False),
        (sent_by(OWN, "none"), False),
        (sent_by(EVIL, "none"), True),
        # Other origins: by the host, the port, the scheme
        (sent_by(EVIL), True),
        (sent_by(EVIL, "cross-site"), True),
        (sent_by(f"{OWN}:3000"), True),
        (sent_by(f"{OWN}:8080"), True),
        (sent_by(f"{OWN}:80", host=f"{HOST}:8080"), True),
        (sent_by(f"https://{HOST}"), True),
        (sent_by(f"{OWN}.evil.example"), True),
        (sent_by("http://evil.slipstream"), True),
        (sent_by(OWN, "same-site"), True),
        (sent_by(OWN, "cross-site"), True),
        (sent_by(f"{OWN}:3000", "same-site"), True),
        (sent_by(None, "cross-site"), True),
        (sent_by(None, "same-site"), True),
        (sent_by(None, "something new"), True),
        # A frame without an origin, a file, a page that does not tell
        (sent_by("null"), True),
        (sent_by("null", "same-origin"), True),
        (sent_by("file://"), True),
        (sent_by(""), True),
        (sent_by("http://"), True),
        # No host to be of
        ({"origin": OWN}, True),
        ([("host", HOST), ("host", "b"), ("origin", OWN)], True),
        # Twice: which one counts?
        ([("host", HOST), ("origin", OWN), ("origin", EVIL)], True),
        ([("host", HOST), ("origin", OWN), ("origin", OWN)], True),
        ([("host", HOST), ("origin", APP), ("origin", EVIL)], True),
        ([("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")], True),
        # Those that the operator has named, however near they are
        (sent_by(APP), False),
        (sent_by(APP, "cross-site"), False),
        (sent_by(APP, "same-site"), False),
        (sent_by("chrome-extension://abc"), False),
        (sent_by("https://app.example"), True),
        (sent_by("http://app.example:8443"), True),
        (sent_by("\xe9"), True),
    ],
)
def test_who_asks(headers: Headers, is_foreign: bool) -> None:
    allowed = (APP, "chrome-extension://abc")
    for method in ("POST", "DELETE", "PUT", "PATCH", "ANYTHING"):
        assert is_foreign_page(scope_of(headers, method), allowed) is is_foreign
    # What only reads may be asked for by all: the browser keeps the answer from the page.
    for method in ("GET", "HEAD", "OPTIONS"):
        assert not is_foreign_page(scope_of(headers, method), allowed)
    assert not is_foreign_page(scope_of(headers), ("*",))


def test_the_scheme_is_the_server_s() -> None:
    secure = sent_by(f"https://{HOST}")
    assert not is_foreign_page(scope_of(secure, scheme="https"), ())
    assert not is_foreign_page(
        scope_of(sent_by(f"https://{HOST}", host=f"{HOST}:443"), scheme="https"), ()
    )
    assert is_foreign_page(scope_of(sent_by(OWN), scheme="https"), ())
    # ASGI may leave it out.
    assert not is_foreign_page(scope_of(sent_by(OWN), scheme=None), ())
    assert is_foreign_page(scope_of(secure, scheme=None), ())


# Under which name


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *((name, True) for name in ("localhost", "localhost:8000", "LOCALHOST:1", "localhost.")),
        *((name, True) for name in ("a.localhost", "a.b.localhost:80")),
        *((name, True) for name in ("127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "0.0.0.0:8000")),
        *((name, True) for name in ("[::1]", "[::1]:8000", "[::]:80", "[fe80::1%eth0]:8000")),
        # No name server is asked for an address, so it needs no entry, wherever it leads.
        *((name, True) for name in ("10.1.2.3:8000", "203.0.113.9", "[2001:db8::1]:8000")),
        *((name, True) for name in ("gpu-box.lan", "GPU-box.lan.:8000", "x.example.org", "")),
        *((name, True) for name in ("a.b.example.org:8000",)),
        *(
            (name, False)
            for name in ("evil.example", "evil.example:8000", "localhost.evil.example")
        ),
        *(
            (name, False)
            for name in ("evillocalhost", "127.0.0.1.evil.example", "127.0.0.1.nip.io")
        ),
        *((name, False) for name in ("example.org", "evilexample.org", "gpu-box.lan.evil.example")),
        *(
            (name, False)
            for name in ("gpu-box", "localhost@evil.example", "evil.example#localhost")
        ),
        *(
            (name, False)
            for name in ("localhost:80:80", "localhost:80a", "localhost/", "local host")
        ),
        *((name, False) for name in ("::1", "[::1", "[localhost]", "[evil.example]", "[::1]evil")),
        *((name, False) for name in ("0x7f.1", "2130706433", "127.1", "localhost,evil.example")),
        *(
            (name, False)
            for name in ("lo\xe7alhost", "a." * 200 + "localhost", "*", "*.localhost.x")
        ),
    ],
)
def test_under_which_name(host: str, is_known: bool) -> None:
    allowed = ("GPU-box.lan", "*.example.org")
    assert is_known_host(scope_of({"host": host}), allowed) is is_known
    assert is_known_host(scope_of({"host": host}), ("*",))


def test_a_program_may_say_no_name_and_none_says_two() -> None:
    assert is_known_host(scope_of({}), ())
    both = [("host", "localhost"), ("host", "evil.example")]
    assert not is_known_host(scope_of(both), ())
    assert not is_known_host(scope_of(both[::-1]), ())


@pytest.mark.parametrize(
    "host",
    ["", "https://a.example", "a.example:8000", "a/b", "*.", "a*", "**", ".a", "[::1]", "a b"],
)
def test_what_is_no_name_is_refused_at_start(host: str) -> None:
    with pytest.raises(ConfigError, match=r"http\.allowed_hosts: expected"):
        check_access(HttpSection(allowed_hosts=(host,)))


def test_names_and_origins_that_are_taken() -> None:
    hosts = ("*", "gpu-box", "a.example.org", "*.example.org", "xn--caf-dma.example", "10.0.0.7")
    check_access(HttpSection(allowed_hosts=hosts))
    origins = ("*", "https://a.example:8443", "chrome-extension://abc", "tauri://localhost")
    check_access(HttpSection(cors_origins=origins))


@pytest.mark.parametrize(
    ("binds", "names"),
    [
        (["127.0.0.1:8000"], ("127.0.0.1",)),
        (["gpu-box.lan:8000", "[::1]:8000"], ("gpu-box.lan",)),
        (["unix:/run/a.b:8", "fd://3", "*:8000", "*.example.org:8000", ":8000"], ()),
    ],
)
def test_serve_answers_to_the_name_that_it_was_told_to_listen_on(
    binds: list[str], names: tuple[str, ...]
) -> None:
    config = Config(http=HttpSection(allowed_hosts=("first",), max_body_bytes=7))
    made = with_own_names(config, binds)
    assert made.http == HttpSection(allowed_hosts=("first", *names), max_body_bytes=7)


# A server


@pytest.fixture(scope="module")
async def open_app(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    """Without keys, as most people run it on their own machine."""
    http = msgspec.structs.replace(config.http, cors_origins=(APP,))
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        yield app


@pytest.fixture(scope="module")
async def browser(open_app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(open_app) as client:
        yield client


def check(answer: httpx.Response, status: int, setting: str) -> None:
    assert answer.status_code == status, answer.text
    if answer.request.method != "HEAD":
        assert setting in answer.json()["error"]["message"]


def computed(app: Starlette) -> int:
    return int(app.state.server.metrics.value("vllm:prompt_tokens_total", engine="0"))


@pytest.mark.parametrize(("path", "methods"), ROUTES)
async def test_every_route_that_is_no_reading_is_closed_to_other_pages(
    browser: httpx.AsyncClient, path: str, methods: list[str]
) -> None:
    for method in {*methods, "POST", "PUT", "PATCH", "DELETE"} - {"GET", "HEAD"}:
        for headers in (
            {"origin": EVIL},
            {"origin": "null"},
            {"origin": EVIL, "content-type": "application/json"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            answer = await browser.request(method, path, headers=headers, content=b"{}")
            check(answer, 403, "http.cors_origins")


@pytest.mark.parametrize(("path", "methods"), ROUTES)
async def test_no_route_but_the_probes_answers_to_another_name(
    browser: httpx.AsyncClient, path: str, methods: list[str]
) -> None:
    for method in methods:
        headers = {"host": "evil.example:8000", "accept": "text/html"}
        answer = await browser.request(method, path, headers=headers)
        if path in OPEN:
            assert answer.status_code in (200, 405)
        elif path.startswith("/v1/messages"):
            assert (answer.status_code, answer.json()["type"]) == (421, "error")
        else:
            check(answer, 421, "http.allowed_hosts")
            if method != "HEAD":
                assert answer.json()["error"]["code"] == "unknown_host"
                assert "'evil.example:8000'" in answer.json()["error"]["message"]


async def test_a_probe_says_less_to_another_name(browser: httpx.AsyncClient) -> None:
    assert "memory" in (await browser.get("/health")).json()
    told = (await browser.get("/health", headers={"host": "evil.example"})).json()
    assert set(told) == {"phase", "progress"}


async def test_nothing_is_computed_for_another_page(
    open_app: Starlette, browser: httpx.AsyncClient
) -> None:
    before = computed(open_app)
    for headers in (sent_by(EVIL), sent_by("null"), {"sec-fetch-site": "cross-site"}):
        for content in (msgspec.json.encode(PROMPT), b""):
            answer = await browser.post(
                "/v1/completions", content=content, headers={**headers, "host": HOST}
            )
            check(answer, 403, "http.cors_origins")
            assert "access-control-allow-origin" not in answer.headers
    assert computed(open_app) == before
    reasons = open_app.state.server.metrics.value(
        "slipstream_http_rejections_total", reason="foreign_origin"
    )
    assert reasons >= 6


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "application/json"},
        {"content-type": "application/json", **sent_by(OWN, "same-origin")},
        {"content-type": "application/json", **sent_by(OWN)},
        {"content-type": "application/json", **sent_by(APP, "cross-site")},
        {"sec-fetch-mode": "cors"},
    ],
)
async def test_programs_and_pages_that_may_are_served(
    open_app: Starlette, browser: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    before = computed(open_app)
    content = msgspec.json.encode(PROMPT)
    answer = await browser.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    assert computed(open_app) > before


@pytest.mark.parametrize("origin", [OWN, APP])
@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_of_a_page_has_to_say_that_it_is_json(
    browser: httpx.AsyncClient, origin: str, kind: str | None
) -> None:
    """A browser asks nobody before it sends one of another type, or of none."""
    headers = {"origin": origin} | ({} if kind is None else {"content-type": kind})
    content = msgspec.json.encode(PROMPT)
    answer = await browser.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 415, answer.text
    assert "application/json" in answer.json()["error"]["message"]


async def test_with_keys_every_name_is_answered_and_other_pages_are_not(config: Config) -> None:
    http = msgspec.structs.replace(config.http, api_keys=(Secret(KEY),), allowed_hosts=())
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    app.state.server.keys = check_access(http)
    app.state.server.config = msgspec.structs.replace(config, http=http)
    async with client_of(app) as client:
        headers = {"authorization": f"Bearer {KEY}", "host": "api.example"}
        assert (await client.get("/version", headers=headers)).status_code == 200
        page = {**headers, "origin": EVIL}
        check(await client.post("/v1/completions", headers=page), 403, "http.cors_origins")


async def test_an_admin_key_alone_is_no_lock_of_the_api(config: Config) -> None:
    http = msgspec.structs.replace(config.http, admin_key=Secret(KEY), allowed_hosts=())
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    app.state.server.keys = check_access(http)
    app.state.server.config = msgspec.structs.replace(config, http=http)
    async with client_of(app) as client:
        for path in ("/version", "/debug/pool"):
            headers = {"authorization": f"Bearer {KEY}", "host": "evil.example"}
            check(await client.get(path, headers=headers), 421, "http.allowed_hosts")
        assert (await client.get("/version", headers={"host": "localhost"})).status_code == 200
