"""Every refusal of the table, and every status: the right answer, and nobody else is hurt."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config
from src.engine.client import AsyncEngine
from src.http import create_app
from tests.http.server.refusals import CHAT, COMPLETIONS, GOOD, REFUSALS, Refusal
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

JSON = {"content-type": "application/json"}
STORY = {"prompt": "once", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


def _group(refusal: Refusal) -> tuple[str, str]:
    return refusal.path, str(refusal.param)


# One test for each path and field.
GROUPS = [
    (f"{path} {param}", list(group))
    for (path, param), group in itertools.groupby(sorted(REFUSALS, key=_group), key=_group)
]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, f"{answer.request.content[-200:]!r}: {answer.text}"
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    # Whatever was sent, it is not sent back at length.
    assert 0 < len(error["message"]) < 500
    return error


def test_the_table_is_large() -> None:
    assert len(REFUSALS) > 700
    assert len({(refusal.path, refusal.body) for refusal in REFUSALS}) == len(REFUSALS)


@pytest.fixture(autouse=True)
def nothing_is_logged(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> Iterator[None]:
    """A client's fault is no line in the log: otherwise clients could fill it."""
    with caplog.at_level(logging.DEBUG, logger="src"):
        yield
    if "500" not in request.node.name:
        lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert not lines


@pytest.mark.parametrize("group", [group for _, group in GROUPS], ids=[name for name, _ in GROUPS])
async def test_what_is_refused(client: httpx.AsyncClient, group: list[Refusal]) -> None:
    for refusal in group:
        answer = await client.post(refusal.path, content=refusal.body, headers=JSON)
        error = error_of(answer, 400)
        assert error["type"] == "invalid_request_error"
        param = refusal.param
        if param is None:
            assert error["param"] is None, (refusal.body[-200:], error)
        else:
            # The field or a place in it, which the message names too.
            assert error["param"], (refusal.body[-200:], error)
            assert error["param"].replace("[", ".").split(".")[0] == param, error
            assert param in error["message"], error


async def test_a_stream_does_not_notice_any_of_them(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    alone = (await client.post(COMPLETIONS, json=STORY)).json()["choices"][0]["text"]
    story = asyncio.create_task(client.post(COMPLETIONS, json={**STORY, "stream": True}))
    await until(lambda: engine.stats.num_running > 0)
    for refusal in REFUSALS[::7]:
        answer = await client.post(refusal.path, content=refusal.body, headers=JSON)
        assert answer.status_code == 400
    events = [line[6:] for line in (await story).text.splitlines() if line.startswith("data: {")]
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == alone
    await until(lambda: engine.stats.num_running == 0)
    assert engine.stats.pool_is_whole


@pytest.mark.parametrize("path", GOOD)
async def test_the_requests_that_the_table_spoils_are_good(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.post(path, json=GOOD[path])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt": "a\\u0000b"',
        '"prompt": "x", "prompt": "y"',
        '"prompt": "x", "n": 500, "n": 1',
        '"prompt": "x", "user": "' + "u" * 10_000 + '"',
        '"prompt": "x", "metadata": ' + '{"a": ' * 100 + "1" + "}" * 100,
        '"prompt": "x", "": 1, "\\u0000": [1, {"a": null}]',
        '"prompt": "\\ud83d\\ude00\\u202e\\ufeff"',
        '"prompt": "x", "temperature": -0.0, "seed": -9223372036854775808',
        '"prompt": "x", "stop": ["\\u0000", "\\ud83d\\ude00"], "cache_salt": "\\u0000"',
    ],
)
async def test_what_is_odd_and_no_fault(client: httpx.AsyncClient, fields: str) -> None:
    body = f'{{{fields}, "max_tokens": 1}}'.encode()
    answer = await client.post(COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 200, answer.text


# The other statuses


async def test_404_405_413_and_415(client: httpx.AsyncClient) -> None:
    for path in (
        *("/v1/", "/v1/completions/", "/v1/completions/x", "/v1//completions", "/V1/models"),
        *("/..%2fetc/passwd", "/%00", "/\u00e9", "/v2/completions"),
    ):
        for method in ("GET", "POST", "DELETE"):
            error = error_of(await client.request(method, path), 404)
            assert error["code"] in ("not_found", "model_not_found")
    assert error_of(await client.get("/"), 404)["code"] == "not_found"  # a page, for browsers
    for path in GOOD:
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"):
            answer = await client.request(method, path)
            assert error_of(answer, 405)["code"] == "method_not_allowed"
            assert answer.headers["allow"]
        large = await client.post(path, content=b" " * 100_001, headers=JSON)
        assert error_of(large, 413)["code"] == "request_too_large"
        for kind in ("text/plain", "text/json", "application/xml", "application/jsonx", "x"):
            answer = await client.post(path, content=b"{}", headers={"content-type": kind})
            assert error_of(answer, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize("value", ["", "x", "-1", "0", "0.0", "1e5", "nan", "inf", "1 s", "9" * 99])
async def test_a_timeout_header_that_is_none(client: httpx.AsyncClient, value: str) -> None:
    headers = {"x-request-timeout": value}
    answer = await client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=headers)
    assert error_of(answer, 400)["param"] == "X-Request-Timeout"


async def test_408_when_there_is_no_token_in_time(client: httpx.AsyncClient) -> None:
    for headers, fields in (({"x-request-timeout": "0.000001"}, {}), ({}, {"timeout": 0.000001})):
        for stream in (False, True):
            body = {**STORY, **fields, "stream": stream}
            answer = await client.post(COMPLETIONS, json=body, headers=headers)
            assert error_of(answer, 408)["code"] == "deadline_exceeded"


@pytest.mark.usefixtures("late_soon")
async def test_a_deadline_ends_a_request_with_what_it_has(client: httpx.AsyncClient) -> None:
    body = {**STORY, "max_tokens": 1000}
    for headers, fields in (
        ({"x-request-timeout": "300"}, {"timeout": 900}),
        ({}, {"timeout": 300}),
    ):
        answer = await client.post(COMPLETIONS, json={**body, **fields}, headers=headers)
        choice = answer.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
        assert 0 < answer.json()["usage"]["completion_tokens"] < 1000


@pytest.fixture(scope="module")
async def small(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    """A server of one row and a queue of two."""
    scheduler = msgspec.structs.replace(config.scheduler, max_num_seqs=1, max_waiting_requests=2)
    app = create_app(msgspec.structs.replace(config, scheduler=scheduler), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        yield app


@pytest.fixture(scope="module")
async def asker(small: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(small)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://slipstream", timeout=60
    ) as client:
        yield client


async def test_429_says_when_to_come_back(small: Starlette, asker: httpx.AsyncClient) -> None:
    engine: AsyncEngine = small.state.server.engine
    long = {**STORY, "max_tokens": 1000}
    stories = [asyncio.create_task(asker.post(COMPLETIONS, json=long))]
    await until(lambda: engine.stats.num_running == 1)
    stories += [asyncio.create_task(asker.post(COMPLETIONS, json=long)) for _ in range(2)]
    await until(lambda: engine.stats.num_waiting == 2)
    refused = await asker.post(COMPLETIONS, json=STORY)
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    first = int(refused.headers["retry-after"])
    # Nobody has been admitted for that long: who waits in a full queue waits longer still.
    engine._observer._last_admitted -= 20
    later = int((await asker.post(COMPLETIONS, json=STORY)).headers["retry-after"])
    assert 1 <= first < 20 <= later <= 60
    engine._observer._last_admitted -= 1000
    assert (await asker.post(COMPLETIONS, json=STORY)).headers["retry-after"] == "60"
    for task in stories:
        task.cancel()
    await asyncio.gather(*stories, return_exceptions=True)
    await until(lambda: engine.stats.num_running + engine.stats.num_waiting == 0)


async def test_503_when_an_answer_does_not_begin(
    small: Starlette,
    asker: httpx.AsyncClient,
    slow_steps: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = small.state.server
    stories = [
        asyncio.create_task(asker.post(COMPLETIONS, json={**STORY, "max_tokens": 1000}))
        for _ in range(2)
    ]
    await until(lambda: server.engine.stats.num_waiting == 1)
    http = msgspec.structs.replace(server.config.http, first_byte_timeout=0.2)
    monkeypatch.setattr(server, "config", msgspec.structs.replace(server.config, http=http))
    waited = await asker.post(COMPLETIONS, json={**STORY, "stream": True})
    error = error_of(waited, 503)
    assert error["code"] == "first_byte_timeout"
    assert "retry-after" in waited.headers
    # It left the queue; the others do not notice.
    assert server.engine.stats.num_waiting <= 1
    for story in stories:
        assert (await story).status_code == 200
    await until(lambda: server.engine.stats.num_running + server.engine.stats.num_waiting == 0)


async def test_500_tells_the_log_and_not_the_client(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object) -> None:
        raise ValueError("a secret path: /etc/slipstream and the prompt hello")

    monkeypatch.setattr("src.http.completions.handlers.run", broken)
    answer = await client.post(COMPLETIONS, json=GOOD[COMPLETIONS])
    error = error_of(answer, 500)
    assert (error["message"], error["code"]) == ("internal error", "internal_error")
    assert "secret" not in answer.text
    assert [r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]


async def test_503_when_it_shuts_down(config: Config) -> None:
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
            await app.state.server.drain(0)
            for path in (COMPLETIONS, CHAT):
                refused = await client.post(path, json=GOOD[path])
                assert error_of(refused, 503)["code"] == "shutting_down"
                assert "retry-after" in refused.headers
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503


# Names of requests


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a", True),
        ("req_0-9.A~/{}", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("two words", False),
        ("tab\tbed", False),
        ("\u00e9", False),
        ("\x7f", False),
    ],
)
async def test_x_request_id(client: httpx.AsyncClient, given: str, kept: bool) -> None:
    headers = httpx.Headers([("x-request-id", given)], encoding="latin-1")
    for path in ("/v1/models", "/nowhere"):
        answer = await client.get(path, headers=headers)
        assert (answer.headers["x-request-id"] == given) == kept
        assert answer.headers["x-request-id"]


async def test_two_requests_of_one_name_do_not_meet(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    headers = {"x-request-id": "same"}
    long = asyncio.create_task(client.post(COMPLETIONS, json=STORY, headers=headers))
    await until(lambda: engine.stats.num_running > 0)
    for _ in range(3):
        short = await client.post(COMPLETIONS, json=GOOD[COMPLETIONS], headers=headers)
        assert short.json()["usage"]["completion_tokens"] == 1
    assert (await long).json()["usage"]["completion_tokens"] == 300
