"""Responses that are kept: their events, what they were asked with, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter
from starlette.applications import Starlette

from src.core.config import Config
from src.engine.client import AsyncEngine
from src.http import create_app
from src.http.responses.encoder import ResponseEncoder
from src.http.responses.event_log import EventLog
from src.http.responses.store import ResponseStore
from tests.http.strict import events_of, strictly
from tests.http.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

PATH = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 12}
LONG = {"max_output_tokens": 400, "ignore_eos": True}
BACKGROUND = {"background": True, "stream": True}


@pytest.fixture
def store(app: Starlette) -> ResponseStore:
    store: ResponseStore = app.state.server.keep(ResponseStore)
    return store


@pytest.fixture
async def official(app: Starlette) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app)
    async with openai.AsyncOpenAI(
        base_url="http://slipstream/v1",
        api_key="x",
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        yield client


_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def read(text: str) -> list[Any]:
    """The events of a stream, strictly as the official client knows them."""
    events = []
    for name, data in events_of(text) if text else []:
        event = _EVENT.validate_json(data, strict=True)
        assert event.type == name
        events.append(event)
    return events


async def begun(client: httpx.AsyncClient, **fields: Any) -> str:
    """The id of a response that is streamed in the background, whose creator has left."""
    body = {**GREEDY, "input": "One", **BACKGROUND, **fields}
    asking = asyncio.create_task(client.post(PATH, json=body))
    name = f"resp_{fields['request_id']}"
    for _ in range(1000):
        shown = await client.get(f"{PATH}/{name}")
        if shown.status_code == 200 and shown.json()["status"] != "queued":
            break
        await asyncio.sleep(0.005)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return name


async def test_a_stream_in_the_background_is_taken_up_again(client: httpx.AsyncClient) -> None:
    body = {**GREEDY, "input": "One", **BACKGROUND, "request_id": "again"}
    answer = await client.post(PATH, json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = read(answer.text)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert events[0].response.status == "queued"
    final: Response = events[-1].response
    assert (final.status, final.background) == ("incomplete", True)
    path = f"{PATH}/resp_again"
    assert strictly(Response, (await client.get(path)).content) == final
    plain = await client.post(PATH, json={**GREEDY, "input": "One"})
    assert final.output_text == strictly(Response, plain.content).output_text
    for after in (None, 0, 3, len(events) - 2, len(events) - 1, len(events) + 5):
        query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
        again = await client.get(path, params=query)
        assert again.status_code == 200
        assert again.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert read(again.text) == events[(-1 if after is None else after) + 1 :]
    # It may be gone on from like any other.
    next_one = await client.post(
        PATH, json={**GREEDY, "input": "Two", "previous_response_id": "resp_again"}
    )
    assert next_one.status_code == 200


async def test_whoever_comes_while_it_goes_on_gets_the_rest(client: httpx.AsyncClient) -> None:
    name = await begun(client, **LONG, request_id="goes-on")
    readers = await asyncio.gather(
        *(
            client.get(f"{PATH}/{name}", params={"stream": "true", "starting_after": str(after)})
            for after in (0, 5)
        )
    )
    first, second = (read(reader.text) for reader in readers)
    assert first[5:] == second
    assert [event.sequence_number for event in first] == list(range(1, len(first) + 1))
    assert first[-1].type == "response.incomplete"
    text = "".join(e.delta for e in first if e.type == "response.output_text.delta")
    assert text == first[-1].response.output_text
    assert len(first) > 100


async def test_the_official_client_takes_a_stream_up_again(official: openai.AsyncOpenAI) -> None:
    stream = await official.responses.create(
        model="tiny", input="One", background=True, stream=True, max_output_tokens=16, temperature=0
    )
    events = [event async for event in stream]
    name = events[0].response.id
    again = await official.responses.retrieve(name, stream=True, starting_after=4)
    assert [event async for event in again] == events[5:]
    items = await official.responses.input_items.list(name)
    assert [item.content[0].text async for item in items] == ["One"]
    count = await official.responses.input_tokens.count(model="tiny", input="One")
    assert count.input_tokens == events[-1].response.usage.input_tokens
    with pytest.raises(openai.BadRequestError):
        await official.responses.cancel(name)


async def test_it_is_cancelled_while_somebody_reads(
    client: httpx.AsyncClient, engine: AsyncEngine, store: ResponseStore
) -> None:
    name = await begun(client, **LONG, request_id="cancelled-while-read")
    reading = asyncio.create_task(client.get(f"{PATH}/{name}", params={"stream": "true"}))
    await asyncio.sleep(0.05)
    cancelled = await client.post(f"{PATH}/{name}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    last = read((await reading).text)[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    await until(lambda: store.num_running == 0 and engine.stats.num_running == 0)
    # Again, it says the same.
    again = await client.post(f"{PATH}/{name}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_what_was_said_before_it_was_cancelled_is_kept(client: httpx.AsyncClient) -> None:
    body = {**GREEDY, **LONG, "input": "One", "background": True, "request_id": "said-before"}
    name = (await client.post(PATH, json=body)).json()["id"]
    shown: Any = {}
    for _ in range(1000):
        shown = (await client.get(f"{PATH}/{name}")).json()
        if shown["output"]:
            break
        await asyncio.sleep(0.002)
    assert shown["output"]
    await client.post(f"{PATH}/{name}/cancel")
    await until_ended(client, name)
    kept = (await client.get(f"{PATH}/{name}")).json()
    assert kept["status"] == "cancelled"
    (item,) = kept["output"]
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"]


async def until_ended(client: httpx.AsyncClient, name: str) -> None:
    """Until its item, which an end closes, is no longer open."""
    for _ in range(1000):
        shown = (await client.get(f"{PATH}/{name}")).json()
        if all(item["status"] != "in_progress" for item in shown["output"]):
            return
        await asyncio.sleep(0.002)


async def test_events_are_kept_of_those_that_are_asked_for_so(client: httpx.AsyncClient) -> None:
    for fields in ({}, {"stream": True}, {"background": True}):
        answer = await client.post(PATH, json={**GREEDY, "input": "x", **fields})
        data = events_of(answer.text)[0][1] if fields.get("stream") else answer.text
        body = json.loads(data)
        name = body.get("id") or body["response"]["id"]
        refused = await client.get(f"{PATH}/{name}", params={"stream": "true"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream"
        assert (await client.get(f"{PATH}/{name}", params={"stream": "false"})).status_code == 200
    for query, param in (
        ({"stream": "yes"}, "stream"),
        ({"stream": "true", "starting_after": "-2"}, "starting_after"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"stream": "true", "starting_after": "9" * 30}, "starting_after"),
    ):
        refused = await client.get(f"{PATH}/{name}", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    refused = await client.post(PATH, json={"input": "x", **BACKGROUND, "store": False})
    assert refused.json()["error"]["param"] == "background"


# While it goes on, and when it ends.
@pytest.mark.parametrize("limit", [15_000, 36_000])
async def test_events_that_there_is_no_room_for_are_let_go_of(
    app: Starlette, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    server = app.state.server
    store = ResponseStore()
    monkeypatch.setitem(server._kept, ResponseStore, store)
    few = msgspec.structs.replace(
        server.config,
        http=msgspec.structs.replace(server.config.http, max_stored_response_bytes=limit),
    )
    monkeypatch.setattr(server, "config", few, raising=False)
    answer = await client.post(
        PATH, json={**GREEDY, **LONG, **BACKGROUND, "input": "One", "request_id": "large"}
    )
    # Who reads them all along has them all.
    events = read(answer.text)
    assert events[-1].type == "response.incomplete"
    assert len(answer.text) > limit
    assert store.size <= limit
    again = await client.get(f"{PATH}/resp_large", params={"stream": "true"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "stream")
    shown = strictly(Response, (await client.get(f"{PATH}/resp_large")).content)
    assert shown == events[-1].response


async def test_a_log_is_read_by_many_and_ends() -> None:
    log = EventLog()
    log.add([b"a", b"b"])
    got: dict[int, bytes] = {}

    async def follow(after: int) -> None:
        got[after] = b""
        async for portion in log.read(after):
            got[after] += portion

    readers = [asyncio.create_task(follow(after)) for after in (-1, 0, 1, 7)]
    await asyncio.sleep(0)
    log.add([b"c" * 70_000])
    leaves = asyncio.create_task(follow(2))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    log.add([b"d"])
    log.close()
    await asyncio.gather(*readers)
    large = b"c" * 70_000
    assert got == {
        -1: b"ab" + large + b"d",
        0: b"b" + large + b"d",
        1: large + b"d",
        7: b"",
        2: b"",
    }
    assert log.size == 70_003
    assert not log._waiting


async def test_a_log_that_has_no_room_keeps_what_its_readers_need() -> None:
    log = EventLog()
    log.add([b"a", b"b"])
    reading = log.read()
    assert await anext(reading) == b"ab"
    log.add([b"c", b"d"])
    log.let_go()
    log.add([b"e"])
    assert log._events == [b"", b"", b"c", b"d", b"e"]
    assert await anext(reading) == b"cde"
    await reading.aclose()
    log.add([b"f"])
    assert not any(log._events)
    assert not log._readers


async def test_a_reader_may_wait_for_what_is_yet_to_come() -> None:
    log = EventLog()
    log.add([b"a"])
    reading = log.read(after=99)
    waits = asyncio.ensure_future(anext(reading, b""))
    await asyncio.sleep(0)
    log.let_go()
    log.add([b"b"])
    log.close()
    assert await waits == b""


async def test_one_in_the_background_makes_no_room_for_itself(
    config: Config, checkpoint: Path
) -> None:
    http = msgspec.structs.replace(config.http, max_stored_responses=3)
    app: Starlette = create_app(msgspec.structs.replace(config, http=http), owns_process=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://slipstream", timeout=60
        ) as client,
    ):
        # Of somebody else, so that whoever asks next has most of what is stored.
        other = {"authorization": "Bearer somebody"}
        done = await client.post(PATH, json={"input": "a", **GREEDY}, headers=other)
        assert done.status_code == 200
        names = []
        for _ in range(3):
            answer = await client.post(PATH, json={"input": "b", "background": True, **LONG})
            names.append(answer.json()["id"])
        for name in names:
            found = await client.get(f"{PATH}/{name}")
            assert found.status_code == 200, found.text


async def test_a_whole_answer_that_fails_is_kept_as_one_that_failed(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of the server")

    with monkeypatch.context() as patched:
        patched.setattr(ResponseEncoder, "take", fail)
        answer = await client.post(PATH, json={"input": "x", **GREEDY, "request_id": "failing"})
    assert answer.status_code == 500
    kept = (await client.get(f"{PATH}/resp_failing")).json()
    assert kept["status"] == "failed"
    assert kept["error"]["code"] == "server_error"


ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {
        "type": "reasoning",
        "id": "rs_mine",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
    },
    {"role": "assistant", "content": "Yes?"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "42"},
    {"role": "user", "content": "And?"},
]


async def pages(client: httpx.AsyncClient, name: str, **query: Any) -> Any:
    answer = await client.get(f"{PATH}/{name}/input_items", params=query)
    assert answer.status_code == 200, answer.text
    return answer


async def test_what_it_was_asked_with_is_listed_in_pages(client: httpx.AsyncClient) -> None:
    body = {**GREEDY, "input": ITEMS}
    name = (await client.post(PATH, json=body)).json()["id"]
    whole = (await pages(client, name, order="asc", limit=100)).content
    listed = strictly(ResponseItemList, whole)
    kinds = [item.type for item in listed.data]
    assert kinds == [item.get("type", "message") for item in ITEMS]
    assert listed.data[2].id == "rs_mine"
    assert (listed.data[3].role, listed.data[3].content[0].type) == ("assistant", "output_text")
    assert listed.data[1].content[0].text == "Hi"
    assert not listed.has_more
    ids = [item.id for item in listed.data]
    assert len(set(ids)) == len(ids)
    assert (listed.first_id, listed.last_id) == (ids[0], ids[-1])
    # Page by page, the newest first unless it is asked otherwise.
    for order, expected in (("asc", ids), ("desc", ids[::-1]), (None, ids[::-1])):
        seen: list[str] = []
        more = True
        while more:
            query: dict[str, Any] = {"limit": 3} | ({"order": order} if order else {})
            if seen:
                query["after"] = seen[-1]
            page = (await pages(client, name, **query)).json()
            seen += [item["id"] for item in page["data"]]
            more = page["has_more"]
        assert seen == expected
    last = (await pages(client, name, after=ids[0], order="desc")).json()
    assert last == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    for query, param in (
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "nobody"}, "after"),
    ):
        refused = await client.get(f"{PATH}/{name}/input_items", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await client.get(f"{PATH}/resp_nobody/input_items")).status_code == 404


async def test_what_is_referred_to_is_listed_as_what_it_was(client: httpx.AsyncClient) -> None:
    first = strictly(Response, (await client.post(PATH, json={**GREEDY, "input": "One"})).content)
    item = first.output[0]
    items = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "And?"}]
    name = (await client.post(PATH, json={**GREEDY, "input": items})).json()["id"]
    listed = strictly(ResponseItemList, (await pages(client, name, order="asc")).content)
    assert listed.data[0] == item
    assert listed.data[1].content[0].text == "And?"


async def test_somebody_elses_items_are_nobodys(client: httpx.AsyncClient) -> None:
    mine, yours = ({"authorization": f"Bearer {name}"} for name in ("a", "b"))
    body = {**GREEDY, "input": "One", **BACKGROUND, "request_id": "mine-alone"}
    assert (await client.post(PATH, json=body, headers=mine)).status_code == 200
    for path in ("/input_items", "?stream=true"):
        assert (await client.get(f"{PATH}/resp_mine-alone{path}", headers=mine)).status_code == 200
        assert (await client.get(f"{PATH}/resp_mine-alone{path}", headers=yours)).status_code == 404


async def test_tokens_are_counted_before_anything_is_asked(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"properties": {}}}
    for fields in (
        {"input": "One"},
        {"input": ITEMS, "instructions": "Say so."},
        {"input": "One", "tools": [tool]},
    ):
        counted = await client.post(f"{PATH}/input_tokens", json=fields)
        body = strictly(InputTokenCountResponse, counted.content)
        answer = (await client.post(PATH, json={**GREEDY, **fields})).json()
        assert body.input_tokens == answer["usage"]["input_tokens"]
        longer = {**fields, "previous_response_id": answer["id"]}
        more = (await client.post(f"{PATH}/input_tokens", json=longer)).json()["input_tokens"]
        assert more > body.input_tokens
    for fields, param in (
        ({}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "conversation": "y"}, "conversation"),
    ):
        refused = await client.post(f"{PATH}/input_tokens", json=fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_what_goes_on_in_the_background_ends_with_the_server(config: Config) -> None:
    short = msgspec.structs.replace(config.http, shutdown_timeout=0.2)
    app = create_app(msgspec.structs.replace(config, http=short), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server._engine.wait_ready()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
            names = [
                await begun(client, **LONG, request_id=f"ends{index}", input="One " * 50)
                for index in range(3)
            ]
        store = app.state.server.keep(ResponseStore)
        running = list(store._tasks)
    assert all(task.done() for task in running)
    assert store.num_running == 0
    for share in store._shares.values():
        for name in names:
            entry = share.entries[name]
            assert entry.body.status in ("failed", "cancelled", "incomplete")
            assert entry.events is not None
            assert entry.events.is_over
