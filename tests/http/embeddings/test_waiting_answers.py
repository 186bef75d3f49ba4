"""Answers with vectors, while their readers take their time."""

from __future__ import annotations

import asyncio
import base64
import gc
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.engine.client import AsyncEngine
from src.engine.execution.step_computer import StepComputer
from src.http.server.held_answers import HeldAnswers
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

SIZE = 64
NUM_TEXTS = 1000
MANY = {"input": [[5 + index % 300] for index in range(NUM_TEXTS)]}
LARGE = 1_000_000


class Reader:
    """Asks for vectors and takes only the head of the answer, until it goes away."""

    def __init__(self, app: Starlette, body: dict[str, Any]) -> None:
        self.begun = False
        self.status = 0
        self._body: bytes | None = msgspec.json.encode(body)
        self._leaves = asyncio.Event()
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "app": app}
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await self._leaves.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        if message["type"] == "http.response.body":
            self.begun = True
            await self._leaves.wait()

    async def leave(self) -> None:
        self._leaves.set()
        await self._task


async def begun(app: Starlette, body: dict[str, Any]) -> list[Reader]:
    """A reader whose answer has begun; one of many texts takes the whole queue until then."""
    reader = Reader(app, body)
    await until(lambda: reader.begun, 30)
    return [reader]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def bounded(app: Starlette, monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    config = app.state.server.config
    http = msgspec.structs.replace(config.http, **limits)
    monkeypatch.setattr(app.state.server, "config", msgspec.structs.replace(config, http=http))


def held() -> int:
    """Bytes that are held now."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.usefixtures("traced")
async def test_an_answer_that_waits_for_its_reader_holds_its_numbers_alone(app: Starlette) -> None:
    readers = await begun(app, MANY)
    before = held()
    try:
        for _ in range(3):
            readers += await begun(app, MANY)
        counted = app.state.server.keep(HeldAnswers).size
        # As a list or as JSON each number alone takes over 20 bytes.
        most = min(3 * 18 * NUM_TEXTS * SIZE, 3 * counted / 4)
        # What the last one was made of goes a few turns later.
        await until(lambda: held() - before < most, 60)
        assert counted / 4 < 20 * NUM_TEXTS * SIZE
    finally:
        for reader in readers:
            await reader.leave()
    assert app.state.server.keep(HeldAnswers).size == 0


async def test_readers_cannot_hold_more_answers_than_there_is_room_for(
    app: Starlette, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded(app, monkeypatch, max_held_vector_bytes=2 * 400 * (4 * SIZE + 256) + 2 * 2**19)
    body = {"input": [[5]] * 400}
    readers = [*await begun(app, body), *await begun(app, body), *await begun(app, body)]
    assert [reader.status for reader in readers] == [200, 200, 429]
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "answers_full"
    assert int(answer.headers["retry-after"]) >= 1
    # What generates is not concerned.
    assert (await client.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200
    for reader in readers:
        await reader.leave()
    assert (await client.post("/v1/embeddings", json=body)).status_code == 200


async def test_a_long_answer_is_sent_in_pieces(client: httpx.AsyncClient) -> None:
    plain = await client.post("/v1/embeddings", json=MANY)
    coded = await client.post("/v1/embeddings", json={**MANY, "encoding_format": "base64"})
    short = await client.post("/v1/embeddings", json={"input": [[5]]})
    assert "content-length" not in plain.headers
    assert int(short.headers["content-length"]) == len(short.content)
    items = zip(plain.json()["data"], coded.json()["data"], strict=True)
    for index, (item, other) in enumerate(items):
        assert item["index"] == other["index"] == index
        # Two requests may be computed in other steps, which round otherwise.
        numbers = struct.unpack(f"<{SIZE}f", base64.b64decode(other["embedding"]))
        assert list(numbers) == pytest.approx(item["embedding"], abs=1e-5)
    assert item["embedding"] != plain.json()["data"][0]["embedding"]


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No step is computed until it is set."""
    goes_on = threading.Event()
    compute = StepComputer.compute

    def held_up(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        goes_on.wait(60)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", held_up)
    yield goes_on
    goes_on.set()


@pytest.mark.usefixtures("traced")
async def test_a_request_for_vectors_is_let_go_of_before_it_is_answered(
    app: Starlette,
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    no_steps: threading.Event,
) -> None:
    bounded(app, monkeypatch, max_body_bytes=2 * LARGE)
    body = {"input": [[5, 6]] * 2, "user": "x" * LARGE}
    readers = [Reader(app, body)]
    await until(lambda: engine.stats.num_running + engine.stats.num_waiting >= 1)
    await asyncio.sleep(0.5)
    before = held()
    readers += [Reader(app, body) for _ in range(5)]
    await until(lambda: len(engine._admissions.unfinished) == 6)
    # Each lets go of its body once its texts are read.
    await until(lambda: held() - before < LARGE / 2, 60)
    no_steps.set()
    await until(lambda: all(reader.begun for reader in readers), 60)
    for reader in readers:
        assert reader.status == 200
        await reader.leave()
