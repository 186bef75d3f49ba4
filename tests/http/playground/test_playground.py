"""The page at ``/``: who gets it, what a browser may do with it, that no file of it is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import msgspec
import pytest

from src.core.config import Config, Secret
from src.core.sampler_parameters import SAMPLER_NAMES
from src.core.sampling_params import SamplingParams
from src.core.settings import CHECKOUT
from src.http import create_app
from src.http.playground import files
from src.http.playground.files import FOLDER, INDEX, NAMES, PARAMETERS
from tests.http.processes import ServerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

WEB = CHECKOUT / "src" / "http" / "playground" / "web"
# What Chromium 150 and Firefox 150 send for an address that is typed in.
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
KEY = "sk-of-a-reader-0123456789"
SCRIPTS = sorted(WEB.glob("*.js"))


@pytest.fixture(scope="module")
async def locked(config: Config, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    http = msgspec.structs.replace(config.http, api_keys=(Secret(KEY),))
    async for client in opened(msgspec.structs.replace(config, http=http)):
        yield client


@pytest.fixture(scope="module")
async def plain(config: Config, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    http = msgspec.structs.replace(config.http, playground=False)
    async for client in opened(msgspec.structs.replace(config, http=http)):
        yield client


async def opened(config: Config) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
            yield client


async def page_of(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.get("/", headers={"accept": BROWSER, **headers})


async def test_a_browser_gets_the_page_and_its_files(client: httpx.AsyncClient) -> None:
    page = await page_of(client)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["vary"] == "accept"
    assert page.text == (WEB / INDEX).read_text()
    for name in NAMES:
        answer = await client.get(FOLDER + name)
        assert answer.status_code == 200
        assert answer.content == files.load(name).content
        kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert answer.headers["content-type"].startswith(kind[name.rpartition(".")[2]])


@pytest.mark.parametrize(
    "accept", ["*/*", "application/json", "text/*", "text/html;q=0", "text/html; q=0.0, */*", ""]
)
async def test_other_programs_are_told_that_there_is_nothing(
    client: httpx.AsyncClient, accept: str
) -> None:
    answer = await client.get("/", headers={"accept": accept})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["message"], error["code"]) == ("there is nothing at /", "not_found")


@pytest.mark.parametrize("accept", ["text/html", "TEXT/HTML", "*/*, text/html;q=0.5", BROWSER])
async def test_html_may_be_asked_for_in_any_spelling(
    client: httpx.AsyncClient, accept: str
) -> None:
    assert (await client.get("/", headers={"accept": accept})).status_code == 200


async def test_a_browser_that_has_a_copy_asks_about_it(client: httpx.AsyncClient) -> None:
    for path in ("/", FOLDER + "main.js"):
        first = await client.get(path, headers={"accept": BROWSER})
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = await client.get(path, headers={"accept": BROWSER, "if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
            assert "content-length" not in again.headers
        changed = await client.get(path, headers={"accept": BROWSER, "if-none-match": '"other"'})
        assert changed.status_code == 200


async def test_nothing_but_this_server_is_let_in(client: httpx.AsyncClient) -> None:
    for path in ("/", *(FOLDER + name for name in NAMES)):
        headers = (await client.get(path, headers={"accept": BROWSER})).headers
        entries = (entry.split() for entry in headers["content-security-policy"].split(";"))
        policy = {name: values for name, *values in entries}
        assert policy["default-src"] == ["'none'"]
        assert {source for values in policy.values() for source in values} <= {
            *("'none'", "'self'", "'script'"),
        }
        assert policy["frame-ancestors"] == policy["base-uri"] == ["'none'"]
        # No text becomes HTML or code, whatever a script of the page would do.
        assert policy["require-trusted-types-for"] == ["'script'"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


async def test_the_page_needs_no_key_and_everything_else_does(locked: httpx.AsyncClient) -> None:
    assert (await page_of(locked)).status_code == 200
    for name in NAMES:
        assert (await locked.get(FOLDER + name)).status_code == 200
        assert (await locked.head(FOLDER + name)).status_code == 200
    refused = [("GET", "/", "*/*"), ("POST", "/", BROWSER), ("GET", "/docs", BROWSER)]
    refused += [("GET", "/v1/models", BROWSER), ("POST", FOLDER + "main.js", "*/*")]
    refused += [("GET", FOLDER + name, BROWSER) for name in ("", "none.js", INDEX, "../files.py")]
    refused += [("GET", "/playground", BROWSER)]
    for method, path, accept in refused:
        answer = await locked.request(method, path, headers={"accept": accept})
        assert answer.status_code == 401, (method, path)
    authorized = {"authorization": f"Bearer {KEY}", "accept": "*/*"}
    assert (await locked.get("/", headers=authorized)).status_code == 404


async def test_without_the_page_nothing_is_there(plain: httpx.AsyncClient) -> None:
    assert (await page_of(plain)).status_code == 404
    for name in (*NAMES, INDEX, "none.js"):
        answer = await plain.get(FOLDER + name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    described = (await plain.get("/openapi.json")).json()["paths"]
    assert "get" not in described["/"]
    assert not [path for path in described if path.startswith(FOLDER)]
    assert (await plain.get("/docs")).status_code == 200


async def test_without_the_page_a_key_is_needed_to_learn_that(config: Config) -> None:
    http = msgspec.structs.replace(config.http, api_keys=(Secret(KEY),), playground=False)
    async for client in opened(msgspec.structs.replace(config, http=http)):
        assert (await page_of(client)).status_code == 401
        assert (await client.get(FOLDER + "main.js")).status_code == 401


async def test_only_the_files_that_are_listed_are_read(client: httpx.AsyncClient) -> None:
    for name in ("none.js", INDEX, "..%2Ffiles.py", "%2e%2e/files.py", "main.js%00", "MAIN.JS"):
        answer = await client.get(FOLDER + name)
        assert answer.status_code == 404


def test_every_file_is_listed_and_there() -> None:
    assert {*(path.name for path in WEB.iterdir()), PARAMETERS} == {*NAMES, INDEX}


def test_the_form_has_every_sampler_parameter_with_bounds_that_the_engine_takes() -> None:
    text = files.load("parameters.js").content.decode()
    shown = json.loads(text.removeprefix("export const PARAMETERS = ").removesuffix(";\n"))
    assert [field["name"] for field in shown] == list(SAMPLER_NAMES)
    for field in shown:
        for bound in (field["least"], field["most"]):
            given = SamplingParams(**{field["name"]: bound})
            given.validate(vocab_size=10**7)


def test_files_are_read_when_they_are_asked_for() -> None:
    command = "import src.http.playground.handlers as h; print(h.load.cache_info().currsize)"
    loaded = subprocess.run(
        [sys.executable, "-c", command], cwd=CHECKOUT, capture_output=True, check=True, text=True
    )
    assert loaded.stdout.split() == ["0"]
    assert files.load(INDEX) is files.load(INDEX)


class Tags(HTMLParser):
    """What an HTML file refers to, and what it would run by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.references += [value for name in ("src", "href") if (value := given.get(name))]
        handlers = [name for name in given if name.startswith("on") or name == "style"]
        self.inline += handlers
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_the_page_refers_to_its_own_files_alone_and_has_nothing_inline() -> None:
    tags = Tags()
    tags.feed((WEB / INDEX).read_text())
    assert not tags.inline
    # Relative, so that a proxy may serve them under a prefix.
    own = {FOLDER.removeprefix("/") + name for name in NAMES} | {"docs", "#question"}
    assert set(tags.references) <= own
    assert not re.search(r"url\(|@import|https?:", (WEB / "style.css").read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_no_html_and_goes_nowhere_else(path: Path) -> None:
    text = path.read_text()
    raw = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\.srcdoc"
    assert not re.search(raw, text)
    elsewhere = set(re.findall(r"[\"'`]((?:https?:)?//[^\"'`]*)", text))
    assert elsewhere <= {"http://www.w3.org/2000/svg"}
    imported = re.findall(r'from "([^"]+)"', text)
    assert {name.removeprefix("./") for name in imported} <= NAMES
    assert len(text.splitlines()) < 300


def test_every_script_is_reached_from_the_first() -> None:
    reached, waiting = set(), ["main.js"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += re.findall(r'from "\./([^"]+)"', files.load(name).content.decode())
    assert reached == {path.name for path in SCRIPTS} | {PARAMETERS}


def test_a_real_server_sends_it_over_one_connection(checkpoint: Path) -> None:
    settings = {"SLIPSTREAM_MODEL": str(checkpoint), "SLIPSTREAM_COMPILE__STARTUP": "off"}
    with ServerProcess.hypercorn(settings) as server, httpx.Client(base_url=server.url) as client:
        server.wait_for("/live")
        # It loads while the model does, and a 304 leaves the connection as it was.
        page = client.get("/", headers={"accept": BROWSER})
        assert page.status_code == 200
        tag = page.headers["etag"]
        again = client.get("/", headers={"accept": BROWSER, "if-none-match": tag})
        assert (again.status_code, again.content) == (304, b"")
        assert "content-length" not in again.headers
        assert "transfer-encoding" not in again.headers
        head = client.head("/", headers={"accept": BROWSER})
        assert (head.status_code, head.content) == (200, b"")
        assert int(head.headers["content-length"]) == len(page.content)
        script = client.get(FOLDER + "main.js")
        assert script.content == (WEB / "main.js").read_bytes()
        ports = {id(a.extensions["network_stream"]) for a in (page, again, head, script)}
        assert len(ports) == 1


def test_an_installed_wheel_has_the_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(CHECKOUT / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, tree / name)
    command = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", command], cwd=tree, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in {*NAMES, INDEX} - {PARAMETERS}:
            path = f"src/http/playground/web/{name}"
            assert archive.read(path) == (WEB / name).read_bytes()
