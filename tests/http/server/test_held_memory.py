"""What is held of a request, while it is served and afterwards: no more than has a use."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import tracemalloc
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.engine.client import AsyncEngine
from src.engine.execution.step_computer import StepComputer
from src.http.responses.store import ResponseStore
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

RESPONSES = "/v1/responses"
# Of nothing but containers: as objects they take twenty times what they take as JSON.
HOLLOW = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "examples": [[]] * 10_000},
}


@pytest.fixture
def store(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> ResponseStore:
    store = ResponseStore()
    monkeypatch.setitem(app.state.server._kept, ResponseStore, store)
    return store


def reached(root: object) -> list[object]:
    """All objects that this one keeps alive, but for code."""
    found = {id(root): root}
    todo = [root]
    while todo:
        for other in gc.get_referents(todo.pop()):
            if id(other) not in found and not isinstance(
                other, type | ModuleType | FunctionType | MethodType
            ):
                found[id(other)] = other
                todo.append(other)
    return list(found.values())


def size(held: object) -> int:
    return len(memoryview(held)) if isinstance(held, msgspec.Raw) else sys.getsizeof(held)


@pytest.mark.parametrize("background", [False, True])
async def test_a_stored_response_takes_the_memory_that_it_counts(
    client: httpx.AsyncClient, store: ResponseStore, background: bool
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    body = {
        "input": [*[call] * 600, {"role": "user", "content": "Well?"}],
        "tools": [HOLLOW],
        "tool_choice": "none",
        "truncation": "auto",
        "max_output_tokens": 1,
        "background": background,
    }
    answer = await client.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tools"] == [HOLLOW]
    if background:
        for task in list(store._tasks):
            await task
    held = reached(store._shares)
    assert store.size > 50_000
    assert sum(map(size, held)) < 1.2 * store.size + 10_000
    # What the garbage collector looks at, again and again.
    assert sum(map(gc.is_tracked, held)) < 100
    # And it is what it was.
    shown = (await client.get(f"{RESPONSES}/{answer.json()['id']}")).json()
    assert (shown["tools"], shown["status"]) == ([HOLLOW], "incomplete")


NUM_REQUESTS = 12
LARGE = 1_000_000
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"user": "x" * LARGE}
NUMBERS = {"metadata": {"a": list(range(100_000))}}
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * LARGE}}
RESPONSE = {"input": "Hi", "tool_choice": "none"}


@pytest.fixture
def slower_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's answer ends while others are still being asked for."""
    compute = StepComputer.compute

    def slow(self: StepComputer, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return compute(self, *arguments, **named)

    monkeypatch.setattr(StepComputer, "compute", slow)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


class Client:
    """Sends one request and keeps nothing of it, until it goes away."""

    def __init__(self, app: Starlette, path: str, body: dict[str, Any]) -> None:
        self._body: dict[str, Any] | None = body
        self._leaves = asyncio.Event()
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "app": app}
        self._task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await self._leaves.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": msgspec.json.encode(body)}

    async def _send(self, message: Any) -> None:
        assert message.get("status", 200) == 200

    async def leave(self) -> None:
        self._leaves.set()
        await self._task


@pytest.mark.usefixtures("slower_steps", "traced", "store")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {**CHAT, **TEXT}),
        ("/v1/chat/completions", {**CHAT, **NUMBERS}),
        ("/v1/chat/completions", {**CHAT, "unheard_of": "x" * LARGE}),
        ("/v1/chat/completions", {**CHAT, "documents": [{"text": "x" * LARGE}]}),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "none"}),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"unused": "x" * LARGE}}),
        ("/v1/chat/completions", {"messages": [{**CHAT["messages"][0], "name": "x" * LARGE}]}),
        ("/v1/completions", {"prompt": "Hi", **TEXT}),
        ("/v1/completions", {"prompt": [[20, 21], [22]], **NUMBERS}),
        ("/v1/messages", {**CHAT, "metadata": {"user_id": "x" * LARGE}}),
        ("/v1/responses", {**RESPONSE, **TEXT}),
        ("/v1/responses", {**RESPONSE, **TEXT, "background": True}),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
async def test_a_request_is_let_go_of_before_it_is_answered(
    app: Starlette,
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    stream: bool,
) -> None:
    config = app.state.server.config
    http = msgspec.structs.replace(config.http, max_body_bytes=2 * LARGE)
    monkeypatch.setattr(app.state.server, "config", msgspec.structs.replace(config, http=http))
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = {"ignore_eos": True, limit: 900, "stream": stream, **fields}
    if "background" in fields:
        del body["stream"]
    num_prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
    clients = [Client(app, path, body)]

    def all_run() -> bool:
        return engine.stats.num_running == len(clients) * num_prompts

    # What is made once is there when the first one runs.
    await until(all_run)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    clients += [Client(app, path, body) for _ in range(NUM_REQUESTS)]

    def are_let_go() -> bool:
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        return held - before < NUM_REQUESTS * LARGE / 10 and all_run()

    try:
        await until(all_run)
        # A thread may be about to forget what it has just done.
        await until(are_let_go, 5.0)
    finally:
        for client in clients:
            await client.leave()
        for task in list(app.state.server.keep(ResponseStore)._tasks):
            task.cancel()
        await until(lambda: engine.stats.num_running == 0)
