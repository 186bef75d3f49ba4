"""Who may pass: every route is walked, with good keys and bad ones."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette._utils import get_route_path
from starlette.applications import Starlette
from starlette.routing import Route

from src.core.config import Config, HttpSection, Secret
from src.core.errors import ConfigError
from src.core.settings import load_config
from src.http import create_app
from src.http.server.error_format import ANTHROPIC
from src.http.server.guard import DEBUG, METRICS, check_access, route_path
from src.http.server.keys import KeyRing, credentials, load_keys

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

ALICE, BOB, ADMIN = "sk-alice-0123456789", "sk-bob-0123456789", "sk-admin-0123456789"
ORIGIN = "https://chat.example.org"
# As files and secret stores of operators may have it: only the hash.
HASHED_BOB = "sha256:" + hashlib.sha256(BOB.encode()).hexdigest()

# Written here once more: who may ask is no detail of the table of endpoints.
OPEN = {"/live", "/ready", "/health", "/ping"}
ADMIN_WRITES = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
# One app without keys has all the routes there are; a parameter is any word.
ROUTES = [
    (re.sub(r"\{[^}]+\}", "tiny", route.path), sorted(route.methods or ()))
    for route in create_app(Config(), owns_process=False).routes
    if isinstance(route, Route)
]


@pytest.fixture(scope="module")
async def guarded(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    http = msgspec.structs.replace(
        config.http,
        api_keys=(Secret(ALICE), Secret(HASHED_BOB)),
        admin_key=Secret(ADMIN),
        cors_origins=(ORIGIN,),
    )
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        yield app


@pytest.fixture(scope="module")
async def nobody(guarded: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(guarded)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def check_refusal(answer: httpx.Response, status: int, code: str) -> None:
    assert answer.status_code == status, answer.text
    if answer.request.method != "HEAD" and answer.request.url.path.startswith(ANTHROPIC):
        assert (answer.json()["type"], status) == ("error", 401)
        assert answer.json()["error"]["type"] == "authentication_error"
    elif answer.request.method != "HEAD":
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
    challenged = answer.headers.get("www-authenticate", "").startswith("Bearer realm=")
    assert challenged == (status == 401)


def test_every_route_of_the_application_is_walked() -> None:
    routes = create_app(Config(), owns_process=False).routes
    # What is no plain route, such as a mounted application, would be walked by nobody.
    assert len(ROUTES) == len(routes)
    assert not [path for path, _ in ROUTES if "{" in path]


@pytest.mark.parametrize(("path", "methods"), ROUTES)
async def test_every_route_needs_a_key_but_the_probes(
    nobody: httpx.AsyncClient, path: str, methods: list[str]
) -> None:
    for method in {*methods, "GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}:
        for headers in ({}, bearer("wrong"), {"x-api-key": "wrong"}):
            answer = await nobody.request(method, path, headers=headers)
            if path in OPEN:
                assert answer.status_code in (200, 405)
            else:
                check_refusal(answer, 401, "invalid_api_key")


@pytest.mark.parametrize(("path", "methods"), ROUTES)
async def test_every_route_takes_the_right_key_only(
    nobody: httpx.AsyncClient, path: str, methods: list[str]
) -> None:
    is_admin = path.startswith(DEBUG) or path in ADMIN_WRITES
    for method in methods:
        for key in (ALICE, BOB):
            answer = await nobody.request(method, path, headers=bearer(key))
            if is_admin:
                check_refusal(answer, 403, "permission_denied")
            else:
                assert answer.status_code not in (401, 403), answer.text
        answer = await nobody.request(method, path, headers=bearer(ADMIN))
        if is_admin or path in ("/metrics", "/v1/models"):
            assert answer.status_code not in (401, 403), answer.text
        elif path not in OPEN:
            check_refusal(answer, 401, "invalid_api_key")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": ALICE}, 403),
        ({"authorization": "Bearer other", "x-api-key": BOB}, 403),
        # As Authorization: Bearer only.
        ({"x-api-key": ADMIN}, 401),
        ({"authorization": f"Bearer {ADMIN}", "x-api-key": ALICE}, 404),
    ],
)
async def test_the_admin_key_is_a_bearer_s_and_an_api_key_is_known_however_it_is_sent(
    nobody: httpx.AsyncClient, headers: dict[str, str], status: int
) -> None:
    answer = await nobody.get("/debug/nowhere", headers=headers)
    if status == 404:
        assert answer.status_code == 404
    else:
        check_refusal(answer, status, "permission_denied" if status == 403 else "invalid_api_key")


async def test_what_is_nowhere_is_told_to_nobody(nobody: httpx.AsyncClient) -> None:
    for path in ("/", "/nowhere", "/v1", "/health/", "/ping/x", "//health", "/HEALTH", "/%2e/live"):
        check_refusal(await nobody.get(path), 401, "invalid_api_key")
        answer = await nobody.get(path, headers=bearer(ALICE))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("headers", "admitted"),
    [
        (bearer(ALICE), True),
        ({"authorization": f"bearer  {ALICE} "}, True),
        ({"x-api-key": ALICE}, True),
        # Anthropic's client sends both when it has both.
        ({"authorization": "Bearer other", "x-api-key": BOB}, True),
        ({"authorization": f"Bearer {BOB}", "x-api-key": "other"}, True),
        ([("authorization", f"Bearer {ALICE}"), ("authorization", "Bearer x")], False),
        ([("x-api-key", ALICE), ("x-api-key", ALICE)], False),
        ({"authorization": ALICE}, False),
        ({"authorization": f"Basic {ALICE}"}, False),
        # As long as Bearer is.
        ({"authorization": f"Digest {ALICE}"}, False),
        ({"authorization": "Bearer"}, False),
        ({"authorization": "Bearer "}, False),
        ({"x-api-key": ""}, False),
        ({"authorization": f"Bearer {ALICE}x"}, False),
        ({"authorization": f"Bearer {ALICE[:-1]}"}, False),
        ({"authorization": f"Bearer {ALICE.upper()}"}, False),
        ({"authorization": f"Bearer {HASHED_BOB}"}, False),
        ({"authorization": "Bearer " + "x" * 5000}, False),
        ({"authorization": "Bearer \xff\xfe"}, False),
        ({"cookie": f"key={ALICE}"}, False),
    ],
)
async def test_how_a_key_is_sent(nobody: httpx.AsyncClient, headers: Any, admitted: bool) -> None:
    encoded = httpx.Headers(headers, encoding="latin-1")
    answer = await nobody.get(f"/v1/models?api_key={ALICE}", headers=encoded)
    assert answer.status_code == (200 if admitted else 401)


async def test_a_body_is_not_read_for_those_who_may_not_pass(
    guarded: Starlette, nobody: httpx.AsyncClient
) -> None:
    body = {"prompt": "hello", "max_tokens": 5}
    before = guarded.state.server.metrics.value(
        "slipstream_http_rejections_total", reason="invalid_api_key"
    )
    check_refusal(await nobody.post("/v1/completions", json=body), 401, "invalid_api_key")
    huge = await nobody.post("/v1/completions", content=b" " * 1_000_000)
    check_refusal(huge, 401, "invalid_api_key")
    after = guarded.state.server.metrics.value(
        "slipstream_http_rejections_total", reason="invalid_api_key"
    )
    assert after == before + 2


async def test_the_path_that_decides_is_the_scope_s(guarded: Starlette) -> None:
    for root, path, status in (
        ("/api", "/api/health", 200),
        ("/api", "/health", 200),
        ("/api", "/api/v1/models", 401),
        ("/health", "/v1/models", 401),
        ("/health", "/health/v1/models", 401),
        ("/health", "/health", 401),
        ("/v1", "/v1/models", 401),
    ):
        transport = httpx.ASGITransport(guarded, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
            answer = await client.get(path, headers={"host": "x/health?"})
        assert answer.status_code == status, (root, path)


@given(
    root=st.text(alphabet="/abh", max_size=4),
    rest=st.text(alphabet="/abh\n", max_size=9),
    is_below=st.booleans(),
)
@example(root="/a", rest="b", is_below=True)
@example(root="/a", rest="/b", is_below=True)
@example(root="/a", rest="", is_below=True)
@example(root="/a/", rest="/live", is_below=True)
def test_the_guard_reads_a_path_as_the_router_does(root: str, rest: str, is_below: bool) -> None:
    # Below its root, or anywhere: by chance alone a path seldom begins with it.
    scope = {"path": root + rest if is_below else rest, "root_path": root}
    assert route_path(scope) == get_route_path(scope)


async def test_a_websocket_is_closed(guarded: Starlette) -> None:
    sent = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await guarded({"type": "websocket", "path": "/live", "headers": []}, receive, send)
    # By the guard, for a reason of policy; the router would say that it does not know the path.
    assert sent == [{"type": "websocket.close", "code": 1008}]


# Other origins


async def test_a_configured_origin_may_ask_and_read(nobody: httpx.AsyncClient) -> None:
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    answer = await nobody.options("/v1/completions", headers=preflight)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    # Of every method that a route has
    methods = {name for _, names in ROUTES for name in names} - {"HEAD"}
    assert "DELETE" in methods
    for method in methods:
        asked = {**preflight, "access-control-request-method": method}
        answer = await nobody.options("/v1/responses/resp_1", headers=asked)
        assert answer.status_code == 200, method
    answer = await nobody.get("/v1/models", headers={"origin": ORIGIN, **bearer(ALICE)})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    # A page may read why it was refused, too.
    refused = await nobody.get("/v1/models", headers={"origin": ORIGIN})
    check_refusal(refused, 401, "invalid_api_key")
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    stranger = {**preflight, "origin": "https://evil.example.org"}
    answer = await nobody.options("/v1/completions", headers=stranger)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


async def test_without_configured_origins_nobody_is_allowed(client: httpx.AsyncClient) -> None:
    preflight = {"origin": ORIGIN, "access-control-request-method": "POST"}
    for answer in (
        await client.options("/v1/completions", headers=preflight),
        await client.get("/v1/models", headers={"origin": ORIGIN}),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]


# Settings


async def test_metrics_may_be_open(config: Config) -> None:
    http = msgspec.structs.replace(config.http, api_keys=(Secret(ALICE),), public_metrics=True)
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    app.state.server.keys = check_access(http)
    app.state.server.config = msgspec.structs.replace(config, http=http)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        assert (await client.get(METRICS)).status_code == 200
        assert (await client.get("/version")).status_code == 401


@pytest.mark.parametrize("api_keys", [(), (Secret(ALICE),)])
async def test_without_an_admin_key_there_are_no_debug_endpoints(
    config: Config, api_keys: tuple[Secret, ...]
) -> None:
    http = msgspec.structs.replace(config.http, api_keys=api_keys)
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    app.state.server.keys = check_access(http)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        for path in ("/debug/pool", "/debug/nowhere", "/debug"):
            answer = await client.get(path, headers=bearer(ALICE))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
            if api_keys:
                check_refusal(await client.get(path), 401, "invalid_api_key")


@pytest.mark.parametrize("admin_key", [None, Secret(ADMIN)])
@pytest.mark.parametrize("api_keys", [(), (Secret(ALICE),)])
async def test_what_changes_the_server_needs_the_admin_key_where_there_is_any_key(
    config: Config, api_keys: tuple[Secret, ...], admin_key: Secret | None
) -> None:
    """With API keys and no admin key nobody may; without any key everybody may."""
    http = msgspec.structs.replace(config.http, api_keys=api_keys, admin_key=admin_key)
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    app.state.server.keys = check_access(http)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ADMIN_WRITES:
            for key in (None, ALICE, ADMIN):
                answer = await client.post(path, headers=bearer(key) if key else {})
                if (not api_keys and admin_key is None) or (key == ADMIN and admin_key is not None):
                    assert answer.status_code not in (401, 403)
                elif key == ALICE and api_keys:
                    check_refusal(answer, 403, "permission_denied")
                else:
                    check_refusal(answer, 401, "invalid_api_key")


async def test_before_the_settings_are_read_only_the_probes_answer(config: Config) -> None:
    transport = httpx.ASGITransport(create_app(config, owns_process=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        assert (await client.get("/live")).status_code == 200
        for path in ("/version", "/debug/pool", "/nowhere"):
            assert (await client.get(path)).status_code == 503


def test_keys_come_from_settings_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the team\n{ALICE}\n\n  {HASHED_BOB}\n")
    config = load_config(
        environ={
            "SLIPSTREAM_HTTP__API_KEYS": "first-key,second-key",
            "SLIPSTREAM_HTTP__API_KEY_FILE": str(file),
        }
    )
    keys = load_keys(config.http).api
    assert len(keys) == 4
    for key in ("first-key", "second-key", ALICE, BOB):
        assert keys.admits([key.encode()])
    assert not keys.admits([HASHED_BOB.encode(), b"", b"three"])
    assert not keys.admits([])
    assert "first-key" not in f"{config.http}"


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (HttpSection(api_keys=(Secret(""),)), "a key has"),
        (HttpSection(api_keys=(Secret(" space"),)), "a key has"),
        (HttpSection(api_keys=(Secret("with spaces in it"),)), "the name of its owner"),
        (HttpSection(api_keys=(Secret("key key-7"),)), "the name of its owner"),
        (HttpSection(api_keys=(Secret("key one"), Secret("key two"))), "two owners, one and two"),
        (HttpSection(api_keys=(Secret("sha256:12"),)), "64 hex digits"),
        (HttpSection(api_keys=tuple(Secret(f"key{i}") for i in range(1025))), "at most 1024"),
        (HttpSection(api_key_file="/dev/null"), "there is no key in it"),
        (HttpSection(api_key_file="/dev/zero"), "larger than"),
        (HttpSection(api_key_file="/nowhere/at/all"), "cannot be read"),
        (HttpSection(api_keys=(Secret(BOB),), admin_key=Secret(BOB)), "one of its own"),
        (HttpSection(cors_origins=("example.org",)), "expected .* or an origin"),
        (HttpSection(cors_origins=("https://example.org/",)), "expected .* or an origin"),
    ],
)
def test_settings_that_are_refused(section: HttpSection, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        check_access(section)
    assert BOB not in str(refused.value)


def test_the_longest_key_is_one_and_nothing_longer_is_looked_at() -> None:
    """However it is sent: what is longer is not even hashed."""
    longest = "k" * 4096
    ring = load_keys(HttpSection(api_keys=(Secret(longest),))).api
    for name, scheme in ((b"authorization", b"Bearer "), (b"x-api-key", b"")):
        assert ring.admits(credentials({"headers": [(name, scheme + longest.encode())]}))
        assert credentials({"headers": [(name, b"Bearer " + b"k" * 4097)]}) == []


def test_as_many_keys_as_there_may_be_are_kept() -> None:
    keys = tuple(Secret(f"key{i}") for i in range(1024))
    assert len(load_keys(HttpSection(api_keys=keys)).api) == 1024


def test_a_bad_list_of_keys_is_not_echoed() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(environ={"SLIPSTREAM_HTTP__API_KEYS": f'["{ALICE}"'})
    assert ALICE not in str(refused.value)


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair is compared, whichever is right, and with the function that is made for it."""
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr("src.http.server.keys.hmac.compare_digest", compare)
    ring = KeyRing(hashlib.sha256(key).digest() for key in (b"a", b"b", b"c"))
    for given_keys in ([b"a"], [b"c"], [b"none"]):
        compared.clear()
        ring.admits(given_keys)
        assert compared == [(32, 32)] * 3


async def test_neither_the_engine_nor_logs_nor_metrics_know_a_key(
    guarded: Starlette, nobody: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        body = {"prompt": "hello", "max_tokens": 2}
        for headers in (bearer(ALICE), bearer(f"{ALICE}x"), {"x-api-key": BOB}):
            await nobody.post("/v1/completions", json=body, headers=headers)
        metrics = (await nobody.get(METRICS, headers=bearer(ALICE))).text
    config = guarded.state.server.engine.config
    assert (config.http.api_keys, config.http.admin_key) == ((), None)
    for key in (ALICE, BOB, ADMIN):
        assert key not in metrics
        assert not [record for record in caplog.records if key in record.getMessage()]


async def test_stored_responses_are_of_the_key_that_was_admitted(nobody: httpx.AsyncClient) -> None:
    """And not of what else is sent: one client would be as many owners as it can make up."""
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 16}
    made = await nobody.post(
        "/v1/responses", json=body, headers={**bearer(ALICE), "x-api-key": "made up"}
    )
    assert made.status_code == 200, made.text
    path = f"/v1/responses/{made.json()['id']}"
    for headers in (
        bearer(ALICE),
        {"x-api-key": ALICE},
        {**bearer(ALICE), "x-api-key": "another"},
        {**bearer("wrong"), "x-api-key": ALICE},
        # Two keys that are known: the first is the one.
        {**bearer(ALICE), "x-api-key": BOB},
    ):
        assert (await nobody.get(path, headers=headers)).status_code == 200, headers
    for headers in (
        bearer(BOB),
        {**bearer(BOB), "x-api-key": "made up"},
        {**bearer(BOB), "x-api-key": ALICE},
    ):
        assert (await nobody.get(path, headers=headers)).status_code == 404, headers


async def test_one_key_with_many_others_evicts_nobody(
    guarded: Starlette, nobody: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = guarded.state.server
    http = msgspec.structs.replace(server.config.http, max_stored_responses=4)
    monkeypatch.setattr(server, "config", msgspec.structs.replace(server.config, http=http))
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 16}

    async def stored(**headers: str) -> str:
        answer = await nobody.post("/v1/responses", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return f"/v1/responses/{answer.json()['id']}"

    kept = [await stored(authorization=f"Bearer {BOB}") for _ in range(2)]
    for number in range(10):
        await stored(**bearer(ALICE), **{"x-api-key": f"made up {number}"})
    for path in kept:
        assert (await nobody.get(path, headers=bearer(BOB))).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/live", "/nowhere"])
async def test_a_body_whose_end_is_told_in_two_ways_is_refused(
    guarded: Starlette, path: str
) -> None:
    """Whatever the path and the key: who stands in front may have believed the other one."""
    sent: list[dict[str, Any]] = []
    given = [
        {"type": "http.request", "body": b"", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return given.pop(0) if len(given) > 1 else given[0]

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")],
    }
    await guarded(scope, receive, send)
    assert sent[0]["status"] == 400
    assert (b"connection", b"close") in sent[0]["headers"]
