"""A client that goes away takes its requests with it, at whatever moment."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.types import Message, Scope

from src.engine.client import AsyncEngine
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Connection:
    """One ASGI connection, driven by hand: it disconnects whenever the test says so."""

    def __init__(self, app: Starlette, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": msgspec.json.encode(body)})
        self.sent: list[Message] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def run(self) -> None:
        async def send(message: Message) -> None:
            await self.gate.wait()
            self.sent.append(message)

        await self._app(self._scope, self._inbox.get, send)

    @property
    def streamed(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def settle(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing left, which must be soon."""
    await until(lambda: engine.stats.num_running + engine.stats.num_waiting == 0, 30)
    # Blocks come free when the last launched step that names them has completed.
    await until(lambda: engine.stats.kv_usage == 0, 30)
    assert engine.stats.pool_is_whole


LONG = {"max_tokens": 1000, "ignore_eos": True}
PLAIN = {"prompt": "hello", **LONG}
CHAT = {"messages": [{"role": "user", "content": "hello"}], **LONG}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PLAIN),
        ("/v1/completions", {**PLAIN, "stream": True}),
        ("/v1/completions", {**PLAIN, "prompt": ["a", "b", "c"], "stream": True, "n": 2}),
        ("/v1/completions", {**PLAIN, "prompt": ["a", "b", "c"], "n": 2}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True, "n": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 900, "ignore_eos": True}),
        ("/v1/responses", {"input": "hello", "ignore_eos": True, "stream": True}),
        ("/v1/messages", {**CHAT, "max_tokens": 900}),
        ("/v1/messages", {**CHAT, "max_tokens": 900, "stream": True}),
    ],
)
async def test_a_disconnect_aborts_what_runs(
    app: Starlette, engine: AsyncEngine, path: str, body: dict[str, Any]
) -> None:
    metrics = app.state.server.metrics
    before = metrics.value("slipstream_client_disconnects_total")
    connection = Connection(app, path, body)
    task = asyncio.create_task(connection.run())
    await until(lambda: engine.stats.num_running > 0)
    if body.get("stream"):
        await until(lambda: b"data: " in connection.streamed)
    connection.disconnect()
    await asyncio.wait_for(task, 20)
    await settle(engine)
    assert b"[DONE]" not in connection.streamed
    assert metrics.value("slipstream_client_disconnects_total") == before + 1


async def test_a_disconnect_while_a_write_is_held_back(app: Starlette, engine: AsyncEngine) -> None:
    connection = Connection(app, "/v1/completions", {**PLAIN, "stream": True})
    task = asyncio.create_task(connection.run())
    await until(lambda: len(connection.sent) > 2)
    connection.gate.clear()
    await asyncio.sleep(0.05)
    connection.disconnect()
    await asyncio.wait_for(task, 20)
    await settle(engine)


async def test_a_reader_that_is_slow_gets_the_same_text_in_fewer_events(
    app: Starlette, engine: AsyncEngine
) -> None:
    body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "temperature": 0}

    def text_of(connection: Connection) -> str:
        events = connection.streamed.decode().split("\n\n")[:-2]
        choices = [msgspec.json.decode(event[6:])["choices"][0] for event in events]
        return "".join(choice["text"] for choice in choices)

    quick = Connection(app, "/v1/completions", {**body, "stream": True})
    await quick.run()
    slow = Connection(app, "/v1/completions", {**body, "stream": True})
    task = asyncio.create_task(slow.run())
    await until(lambda: len(slow.sent) > 3)
    slow.gate.clear()
    # The engine does not wait for its reader.
    await settle(engine)
    already = len(slow.sent)
    slow.gate.set()
    await task
    assert text_of(slow) == text_of(quick)
    # The write that was held back, one with all the rest, and the end.
    assert len(slow.sent) <= already + 3


async def test_a_client_that_leaves_while_it_sends_costs_nothing(
    app: Starlette, engine: AsyncEngine
) -> None:
    connection = Connection(app, "/v1/completions", PLAIN)
    connection._inbox.get_nowait()
    connection._inbox.put_nowait({"type": "http.request", "body": b'{"pro', "more_body": True})
    connection.disconnect()
    await asyncio.wait_for(connection.run(), 20)
    assert connection.sent == []
    await settle(engine)


async def test_many_disconnects_at_random_moments_leave_no_task(
    app: Starlette, engine: AsyncEngine
) -> None:
    before = asyncio.all_tasks()
    connections = [
        Connection(
            app,
            "/v1/completions",
            {**PLAIN, "max_tokens": 20 + i, "n": 1 + i % 2, "stream": i % 3 > 0},
        )
        for i in range(48)
    ]
    loop = asyncio.get_running_loop()
    for i, connection in enumerate(connections):
        if i % 4:
            loop.call_later(0.004 * (i * 7 % 50), connection.disconnect)
    await asyncio.wait_for(asyncio.gather(*(c.run() for c in connections)), 40)
    await settle(engine)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()
    for i, connection in enumerate(connections):
        if i % 4 == 0:
            assert connection.sent[-1].get("more_body") is False
