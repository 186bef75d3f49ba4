"""The debug endpoints: who may see them, what they show, and what they never show."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config, HttpSection, Secret
from src.core.errors import ConfigError
from src.core.settings import known_settings, load_config
from src.core.views import PoolView, RequestsView, TimelineView
from src.engine.client import AsyncEngine
from src.http import create_app
from src.http.endpoints import ENDPOINTS
from src.http.server.keys import admin_key, load_keys
from tests.http.waiting import until
from tests.support.compiling import compile_settings

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

KEY = "correct-horse-battery-staple"
ADMIN = {"authorization": f"Bearer {KEY}"}
DEBUG = [(entry.path, entry.method) for entry in ENDPOINTS if entry.path.startswith("/debug")]


@pytest.fixture(scope="module")
async def debugged(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    http = msgspec.structs.replace(config.http, admin_key=Secret(KEY), allowed_hosts=("*",))
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        yield app


@pytest.fixture(scope="module")
async def admin(debugged: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(debugged)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://slipstream", headers=ADMIN, timeout=60
    ) as client:
        yield client


async def complete(client: httpx.AsyncClient, tokens: int = 20, **fields: Any) -> None:
    body = {"prompt": [31, 32, 33, 34], "max_tokens": tokens, "ignore_eos": True, **fields}
    assert (await client.post("/v1/completions", json=body)).status_code == 200


# Who may see them


@pytest.mark.parametrize(("path", "method"), [*DEBUG, ("/debug", "GET"), ("/debug/else", "PUT")])
async def test_without_a_configured_key_there_is_nothing(
    client: httpx.AsyncClient, path: str, method: str
) -> None:
    answer = await client.request(method, path, headers=ADMIN)
    plain = await client.request(method, "/nowhere", headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert answer.text == plain.text.replace("/nowhere", path)
    assert set(answer.headers) == set(plain.headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEY}"},
        {"authorization": KEY},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer " + "x" * 10_000},
        {"authorization": "Bearer \xff"},
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer wrong")],
        {"x-api-key": KEY},
    ],
)
@pytest.mark.parametrize(("path", "method"), [*DEBUG, ("/debug", "GET"), ("/debug/else", "PUT")])
async def test_a_wrong_key_is_401(
    debugged: Starlette, path: str, method: str, headers: Any
) -> None:
    encoded = httpx.Headers(headers, encoding="latin-1")
    transport = httpx.ASGITransport(debugged)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        answer = await client.request(method, path, headers=encoded)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "invalid_api_key"
    assert KEY not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        *("/debug/timeline/", "/debug//timeline", "//debug/timeline", "/./debug/timeline"),
        *("/debug/../debug/timeline", "/DEBUG/timeline", "/debug/timeline%00", "/debug/%74imeline"),
        *("/v1/../debug/timeline", "/debug;x/timeline", "/debug/timeline/x", "/%64ebug/timeline"),
        *("/v1/models/../../debug/timeline", "/v1/models//debug/timeline"),
    ],
)
async def test_no_spelling_of_a_path_gets_around_the_guard(debugged: Starlette, path: str) -> None:
    """Whatever is in the path and in Host: without the key nothing of a timeline comes out."""
    for root in ("", "/debug", "/api"):
        transport = httpx.ASGITransport(debugged, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
            request = client.build_request("GET", "http://slipstream/", headers={"host": "a/v1?"})
            request.url = request.url.copy_with(raw_path=path.encode())
            answer = await client.send(request)
        assert answer.status_code in (401, 404)
        assert "traceEvents" not in answer.text


async def test_a_proxy_s_prefix_does_not_move_the_guard(debugged: Starlette) -> None:
    transport = httpx.ASGITransport(debugged, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        for path in ("/api/debug/pool", "/debug/pool"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=ADMIN)).status_code == 200


async def test_with_the_key_what_is_not_there_is_404_and_405(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/debug/else")).status_code == 404
    assert (await admin.get("/debug")).status_code == 404
    assert (await admin.post("/debug/timeline")).status_code == 405
    assert (await admin.put("/debug/profile")).status_code == 405


def test_the_key_comes_from_a_setting_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    by_file = load_keys(HttpSection(admin_key_file=str(file))).admin
    by_setting = load_keys(HttpSection(admin_key=Secret(KEY))).admin
    assert by_file.admits([KEY.encode()])
    assert by_setting.shares(by_file)
    assert len(load_keys(HttpSection()).admin) == 0
    both = HttpSection(admin_key=Secret(KEY), admin_key_file=str(file))
    with pytest.raises(ConfigError, match="both set"):
        admin_key(both)
    for empty in (HttpSection(admin_key=Secret(" ")), HttpSection(admin_key_file="/dev/null")):
        with pytest.raises(ConfigError, match="is empty"):
            admin_key(empty)
    with pytest.raises(ConfigError, match="cannot be read"):
        admin_key(HttpSection(admin_key_file=str(tmp_path / "none")))


def test_the_key_is_shown_nowhere(tmp_path: Path) -> None:
    config = load_config(environ={"SLIPSTREAM_HTTP__ADMIN_KEY": KEY})
    assert config.http.admin_key == Secret(KEY)
    assert KEY not in f"{config} {config!r} {config.http.admin_key} {config.http}"
    with pytest.raises(TypeError):
        msgspec.json.encode(config)
    file = tmp_path / "settings.toml"
    file.write_text("[http]\nadmin_key = 123456789\n")
    with pytest.raises(ConfigError) as wrong:
        load_config(file, environ={})
    assert "123456789" not in str(wrong.value)
    assert "http.admin_key: expected a text" in str(wrong.value)
    secret = [name for name, setting in known_settings().items() if setting.is_secret]
    assert secret == ["http.api_keys", "http.admin_key"]
    assert load_config(environ={"SLIPSTREAM_HTTP__ADMIN_KEY": ""}).http.admin_key is None


async def test_neither_answers_nor_logs_have_the_key(
    admin: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await complete(admin)
        texts = [
            (await admin.request(method, path)).text for path, method in DEBUG if method == "GET"
        ]
        texts.append((await admin.get(f"/debug/{KEY}/timeline?{KEY}=1")).headers.__repr__())
    assert not [text for text in texts if KEY in text]
    assert not [
        record
        for record in caplog.records
        if record.name.startswith("src") and KEY in record.getMessage()
    ]


# What they show


async def test_the_timeline_has_the_steps_and_the_request(admin: httpx.AsyncClient) -> None:
    await complete(admin, tokens=12)
    trace = (await admin.get("/debug/timeline")).json()
    names = {event["name"] for event in trace["traceEvents"]}
    last = trace["otherData"]["last_step"]
    assert {f"plan {last}", f"launch {last}", f"commit {last}", f"step {last}"} <= names
    assert {"prefill", "decode"} <= names
    few = (await admin.get("/debug/timeline?steps=3")).json()
    assert few["otherData"]["first_step"] == last - 2
    records = (await admin.get("/debug/timeline?format=records")).content
    view = msgspec.json.decode(records, type=TimelineView)
    assert view.steps[-1].step_id == last
    assert view.requests[-1].num_tokens == 12
    after = (await admin.get(f"/debug/timeline?format=records&after={last - 4}")).content
    ids = [step.step_id for step in msgspec.json.decode(after, type=TimelineView).steps]
    assert ids == list(range(last - 3, last + 1))
    none = (await admin.get(f"/debug/timeline?format=records&after={last}")).content
    assert msgspec.json.decode(none, type=TimelineView).steps == []


async def test_requests_pool_and_plan_are_those_of_the_moment(
    debugged: Starlette, admin: httpx.AsyncClient
) -> None:
    engine: AsyncEngine = await debugged.state.server.ready_engine()
    secret_prompt = [201, 202, 203] * 20
    headers = {"x-request-id": "mine"}
    await complete(admin, 1, prompt=secret_prompt)
    running = asyncio.create_task(
        admin.post(
            "/v1/completions",
            json={"prompt": secret_prompt, "max_tokens": 700, "ignore_eos": True, "n": 2},
            headers=headers,
        )
    )
    await until(lambda: engine.stats.num_running == 2 and engine.stats.kv_usage > 0)
    await until(lambda: len(engine.inspector.requests().requests) == 2)
    await asyncio.sleep(0.1)
    view = msgspec.json.decode((await admin.get("/debug/requests")).content, type=RequestsView)
    pool = msgspec.json.decode((await admin.get("/debug/pool?cells=7")).content, type=PoolView)
    plans = (await admin.get("/debug/plan?plans=2")).json()["plans"]
    limited = msgspec.json.decode(
        (await admin.get("/debug/requests?limit=1")).content, type=RequestsView
    )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [request.index for request in view.requests] == [0, 1]
    for request in view.requests:
        assert (request.phase, request.request_id, request.prompt_tokens) == ("running", "mine", 60)
        assert request.row >= 0
        assert request.blocks * 16 >= request.computed_tokens > 0
        assert 0 <= request.waited <= request.age
        assert request.output_tokens > 0
    assert (len(limited.requests), limited.omitted) == (1, 1)
    assert pool.free + pool.cached + pool.held == pool.num_blocks == 1024
    assert pool.held > 0
    assert sum(pool.references.values()) == pool.held
    # Both completions share the full blocks of their prompt, which were computed before.
    assert pool.references[2] == 3
    assert len(pool.map) == 7
    totals = [sum(cell[place] for cell in pool.map) for place in range(3)]
    assert totals == [pool.free, pool.cached, pool.held]
    assert len(plans) == 2
    assert plans[1]["step_id"] == plans[0]["step_id"] + 1
    assert {row["row"] for row in plans[1]["rows"]} == {r.row for r in view.requests}


async def test_no_token_of_a_prompt_is_shown(admin: httpx.AsyncClient) -> None:
    prompt = [255, 254, 253, 252]
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True}
    assert (await admin.post("/v1/completions", json=body)).status_code == 200
    for path in ("timeline", "timeline?format=records", "requests", "pool", "plan"):
        text = (await admin.get(f"/debug/{path}")).text
        assert "token_ids" not in text
        assert "[255,254" not in text.replace(" ", "")
    install = (await admin.get("/debug/plan")).json()["plans"][-3:]
    assert any(i["num_tokens"] == 4 for plan in install for i in plan["installs"])


@pytest.mark.parametrize(
    "query",
    ["steps=0", "steps=x", "steps=-1", "steps=1&steps=2", "stesp=3", "format=xml", "after=1.5",
     "steps=99999999999999999999999", "steps=٣"],
)  # fmt: skip
async def test_a_query_is_honoured_or_refused_by_name(admin: httpx.AsyncClient, query: str) -> None:
    answer = await admin.get(f"/debug/timeline?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_before_the_model_is_there_they_say_so(config: Config) -> None:
    http = msgspec.structs.replace(config.http, admin_key=Secret(KEY), allowed_hosts=("*",))
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=transport, base_url="http://slipstream", headers=ADMIN
        ) as early,
    ):
        assert (await early.get("/debug/timeline")).json()["otherData"]["last_step"] == 0
        for path in ("requests", "pool"):
            assert (await early.get(f"/debug/{path}")).status_code == 503
        assert (await early.post("/debug/profile")).status_code == 503
        await app.state.server.ready_engine()


# The profiler


async def profiled(admin: httpx.AsyncClient) -> httpx.Response:
    while (answer := await admin.get("/debug/profile")).status_code == 202:
        await asyncio.sleep(0.02)
    return answer


async def test_some_steps_can_be_profiled(admin: httpx.AsyncClient) -> None:
    missing = await admin.get("/debug/profile")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    started = await admin.post("/debug/profile?steps=4")
    assert (started.status_code, started.json()) == (202, {"phase": "running", "steps": 4})
    again = await admin.post("/debug/profile")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    assert (await admin.get("/debug/profile")).status_code == 202
    await complete(admin, tokens=30)
    answer = await profiled(admin)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/gzip"
    trace = json.loads(gzip.decompress(answer.content))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    layers, most = 2, 4 + 2
    calls = sum("paged_attention" in name for name in names)
    if compile_settings()["enforce_eager"]:
        assert 4 * layers <= calls <= 2 * most * layers
    else:
        # A step of compiled code is one call, and in it no op of torch's.
        assert names
        assert calls == 0
    # The next one replaces it.
    assert (await admin.post("/debug/profile?steps=1")).status_code == 202
    await complete(admin)
    assert (await profiled(admin)).status_code == 200


@pytest.mark.parametrize("steps", ["0", "101", "x"])
async def test_a_profile_is_bounded(admin: httpx.AsyncClient, steps: str) -> None:
    answer = await admin.post(f"/debug/profile?steps={steps}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "steps")


async def test_a_profile_without_steps_ends(
    debugged: Starlette, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.engine.telemetry.inspector.PROFILE_SECONDS", 0.2)
    assert (await admin.post("/debug/profile")).status_code == 202
    assert (await profiled(admin)).status_code == 200
    await complete(admin)


async def test_a_trace_that_is_too_large_is_a_failure_of_its_own(
    admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.engine.execution.profiler.MAX_TRACE_BYTES", 10)
    assert (await admin.post("/debug/profile?steps=1")).status_code == 202
    await complete(admin)
    answer = await profiled(admin)
    assert (answer.status_code, answer.json()["phase"]) == (500, "failed")
    await complete(admin)


async def test_closing_ends_a_profile(config: Config) -> None:
    engine = AsyncEngine(config)
    engine.start()
    await engine.wait_ready()
    engine.inspector.start_profile(5)
    await asyncio.sleep(0)
    await asyncio.wait_for(engine.close(), 20)
    assert engine.inspector._profiling is None
