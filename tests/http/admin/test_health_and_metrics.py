from __future__ import annotations

import asyncio
import logging
import re
import threading
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config, Secret
from src.core.memory_report import MemoryReport
from src.core.version import VERSION
from src.engine.execution.step_computer import StepComputer
from src.engine.requests.prompts import RequestBuilder
from src.engine.startup import build_engine
from src.engine.telemetry import health
from src.http import create_app
from tests.http.waiting import until
from tests.support.probe import Probe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def client_of(app: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://slipstream")


async def test_a_ready_server_says_so(client: httpx.AsyncClient) -> None:
    for path in ("/ready", "/health"):
        answer = await client.get(path)
        body = answer.json()
        assert ("memory" in body) == (path == "/health")
        body.pop("memory", None)
        assert (answer.status_code, body) == (200, {"phase": "ready", "progress": 1.0})
    assert (await client.get("/live")).status_code == 200
    assert (await client.get("/version")).json() == {"version": VERSION}


async def test_health_says_where_memory_goes_to_those_with_a_key(config: Config) -> None:
    http = msgspec.structs.replace(
        config.http, api_keys=(Secret("an-api-key"),), admin_key=Secret("an-admin-key")
    )
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert "memory" not in (await client.get("/health")).json()
        engine = await app.state.server.ready_engine()
        for key, trusted in (
            (None, False),
            ("another-key", False),
            ("an-api-key", True),
            ("an-admin-key", True),
        ):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            for path in ("/health", "/ping", "/ready"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 200
                assert ("memory" in answer.json()) == (trusted and path != "/ready")
        answer = await client.get("/health", headers={"x-api-key": "an-api-key"})
        memory = msgspec.convert(answer.json()["memory"], MemoryReport)
        assert memory == engine.inspector.memory
        assert memory.kv is not None
        assert memory.kv.bytes > 0


async def test_the_models_are_the_served_names(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == ["tiny", "org/alias"]
    for model in models["data"]:
        assert model["max_model_len"] == 1024
        assert model["implementation"] == "native"
        assert (await client.get(f"/v1/models/{model['id']}")).json() == model
    missing = await client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_metrics_count_what_was_served(client: httpx.AsyncClient) -> None:
    async def value(name: str) -> float:
        text = (await client.get("/metrics")).text
        line = next(line for line in text.splitlines() if line.startswith(name + "{"))
        return float(line.rpartition(" ")[2])

    names = (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        'vllm:request_success_total{finished_reason="length"',
    )
    before = [await value(name.partition("{")[0]) for name in names]
    body = {"prompt": [31, 32, 33], "max_tokens": 5, "ignore_eos": True}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    after = [await value(name.partition("{")[0]) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)][:3] == [5, 3, 1]
    assert await value("vllm:num_requests_running") == 0


async def test_head_of_metrics_has_no_body(client: httpx.AsyncClient) -> None:
    got, head = await client.get("/metrics"), await client.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    asking = {"accept": "application/openmetrics-text; version=1.0.0"}
    assert (await client.get("/metrics", headers=asking)).text.endswith("# EOF\n")


async def test_before_the_lifespan_nothing_is_ready_and_everything_answers(
    config: Config,
) -> None:
    async with client_of(create_app(config, owns_process=False)) as client:
        assert (await client.get("/live")).status_code == 200
        # Whether it needs a key is not known yet.
        assert (await client.get("/metrics")).status_code == 503
        for path in ("/ready", "/health"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["progress"]) == (503, 0.0)
        answer = await client.post("/v1/completions", json={"prompt": "hello"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_requests_wait_for_the_model_and_are_then_served(config: Config) -> None:
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert (await client.get("/ready")).status_code == 503
        answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert answer.status_code == 200
        assert (await client.get("/ready")).status_code == 200


async def test_requests_wait_no_longer_than_configured(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def slow_build(*arguments: Any) -> Any:
        assert asked.wait(60)
        return build_engine(*arguments)

    monkeypatch.setattr("src.engine.startup.build_engine", slow_build)
    http = msgspec.structs.replace(config.http, ready_wait=0.01)
    app = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hello"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_loading"
        assert int(answer.headers["retry-after"]) >= 1
        asked.set()
        await app.state.server._engine.wait_ready()


async def test_a_full_queue_is_429_with_retry_after(config: Config) -> None:
    scheduler = msgspec.structs.replace(config.scheduler, max_num_seqs=1, max_waiting_requests=2)
    app = create_app(msgspec.structs.replace(config, scheduler=scheduler), owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        engine = await app.state.server.ready_engine()
        body = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True}
        running = [
            asyncio.create_task(client.post("/v1/completions", json=body, timeout=60))
            for _ in range(8)
        ]
        answers = await asyncio.gather(*running)
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert len(refused) < len(answers)
        for answer in refused:
            assert answer.json()["error"]["code"] == "queue_full"
            assert int(answer.headers["retry-after"]) >= 1
        assert engine.stats.num_running == engine.stats.num_waiting == 0


async def test_a_hanging_device_is_503_with_what_hangs_and_everything_answers(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_PATIENCE", 1.0)
    let_go, compute = threading.Event(), StepComputer.compute

    def hanging_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        assert let_go.wait(30)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", hanging_compute)
    observability = msgspec.structs.replace(config.observability, stall_seconds=0.2)
    app = create_app(msgspec.structs.replace(config, observability=observability))
    app.state.server.owns_process = False
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.server.ready_engine()
        assert (await client.get("/health")).status_code == 200
        body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        running = asyncio.create_task(client.post("/v1/completions", json=body, timeout=60))
        while (answer := await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.02)
        stalled = answer.json()["stalled"]
        assert (answer.status_code, answer.json()["phase"]) == (503, "ready")
        assert stalled["phase"] == "device"
        assert stalled["seconds"] >= 0.2
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        text = (await client.get("/metrics")).text
        assert re.search(r"^slipstream_stalled_seconds (0\.[2-9]|[1-9])", text, re.MULTILINE)
        let_go.set()
        assert (await running).status_code == 200
        for path in ("/health", "/ready"):
            assert (await client.get(path)).status_code == 200


async def test_who_would_be_refused_is_not_sent_here(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, compute = threading.Event(), StepComputer.compute

    def waiting_compute(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        assert let_go.wait(30)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", waiting_compute)
    scheduler = msgspec.structs.replace(config.scheduler, max_num_seqs=1, max_waiting_requests=2)
    app = create_app(msgspec.structs.replace(config, scheduler=scheduler), owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        engine = await app.state.server.ready_engine()
        body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        running = []
        for waiting in (0, 1, 2):
            assert (await client.get("/ready")).status_code == 200
            running.append(
                asyncio.create_task(client.post("/v1/completions", json=body, timeout=60))
            )
            await until(lambda: engine.stats.num_running == 1)
            await until(lambda waiting=waiting: engine.stats.num_waiting == waiting)
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["queue"]) == (503, "full")
        assert (await client.get("/health")).status_code == 200
        let_go.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        assert (await client.get("/ready")).json() == {"phase": "ready", "progress": 1.0}


async def test_a_line_of_the_log_has_the_clients_name_of_the_request(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "src.requests")
    observability = msgspec.structs.replace(config.observability, log_requests=True)
    config = msgspec.structs.replace(config, observability=observability)
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.server.ready_engine()
        answer = await client.post(
            "/v1/completions",
            json={"prompt": ["hello", "world"], "max_tokens": 3, "ignore_eos": True},
            headers={"x-request-id": "client-7"},
        )
        assert answer.headers["x-request-id"] == "client-7"
    lines = [record for record in caplog.records if record.name == "src.requests"]
    assert [line.__dict__["request_id"] for line in lines] == ["client-7"] * 2


async def test_while_draining_streams_finish_and_new_requests_are_refused(config: Config) -> None:
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        engine = await app.state.server.ready_engine()
        body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
        running = asyncio.create_task(client.post("/v1/completions", json=body, timeout=60))
        await until(lambda: engine.stats.num_running > 0)
        draining = asyncio.create_task(app.state.server.drain())
        await asyncio.sleep(0.02)
        refused = await client.post("/v1/completions", json={"prompt": "hello"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        await draining
        answer = await running
        assert '"finish_reason":"length"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["hello", "world"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi", "background": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/tokenize", {"prompt": "hello"}),
    ],
)
async def test_draining_finishes_requests_that_are_still_being_tokenized(
    config: Config, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    entered, released, real = asyncio.Event(), asyncio.Event(), RequestBuilder.tokenize

    async def slow(*arguments: Any) -> Any:
        entered.set()
        await released.wait()
        return await real(*arguments)

    monkeypatch.setattr(RequestBuilder, "tokenize", slow)
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    body = fields if "count" in path or path == "/tokenize" else {**fields, limit: 20}
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        await app.state.server.ready_engine()
        accepted = asyncio.create_task(client.post(path, json=body, timeout=60))
        await entered.wait()
        draining = asyncio.create_task(app.state.server.drain())
        await asyncio.sleep(0.02)
        assert (await client.post(path, json=body)).status_code == 503
        assert not draining.done()
        released.set()
        assert (await accepted).status_code == 200, (await accepted).text
        await draining


async def test_a_dead_engine_fails_its_requests_and_says_so(config: Config) -> None:
    app = create_app(config, owns_process=False)
    async with app.router.lifespan_context(app), client_of(app) as client:
        engine = await app.state.server.ready_engine()
        body = {"prompt": "hello", "max_tokens": 900, "ignore_eos": True}
        whole, streamed = (
            asyncio.create_task(
                client.post("/v1/completions", json={**body, "stream": stream}, timeout=60)
            )
            for stream in (False, True)
        )
        count = "vllm:time_to_first_token_seconds_count"
        await until(lambda: engine.metrics.value(count) == 2)

        def break_down() -> None:
            raise MemoryError("of /some/secret/path")

        # The loop itself is hit, as by a fault of ours, not one step or one request.
        Probe(engine).loop.scheduler.schedule = break_down
        assert isinstance(await engine.wait_dead(), MemoryError)
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
        text = (await streamed).text
        assert 'data: {"error":{' in text
        assert text.endswith("data: [DONE]\n\n")
        assert "secret" not in answer.text + text
        for path in ("/ready", "/health"):
            got = await client.get(path)
            assert (got.status_code, got.json()["phase"]) == (503, "failed")
        late = await client.post("/v1/completions", json={"prompt": "hello"})
        assert (late.status_code, late.json()["error"]["code"]) == (500, "engine_dead")
