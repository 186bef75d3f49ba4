"""What is held of a request, while it is served and afterwards: no more than has a use."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, MethodType, ModuleType

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.http.responses.store import ResponseStore

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
    monkeypatch.setattr(app.state.server, "responses", store)
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
