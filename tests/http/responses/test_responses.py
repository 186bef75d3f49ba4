"""``/v1/responses``, validated by the types of the official client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from starlette.applications import Starlette

from src.core.errors import EngineDeadError, InvalidRequestError
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import ChatOptions, RequestBuilder
from src.engine.requests.submission import Submission
from src.http.protocol.logprobs import ChatLogprob
from src.http.protocol.responses import OutputMessage, OutputText, ResponseRequest
from src.http.responses.store import ResponseStore
from src.http.responses.translation import translate
from src.http.server.body import ClientDisconnectedError
from src.http.server.call import Call
from tests.http.asking import client_of
from tests.http.strict import events_of, strictly
from tests.http.waiting import until
from tests.support.slowness import own_time

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

PATH = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 12}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKS_WEATHER = "What is the weather in Paris?"


@pytest.fixture
async def demo(demo_app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(demo_app) as client:
        yield client


async def respond(client: httpx.AsyncClient, **fields: Any) -> Response:
    answer = await client.post(PATH, json={**GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    response: Response = strictly(Response, answer.content)
    return response


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[Any]:
    answer = await client.post(PATH, json={**GREEDY, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for name, data in events_of(answer.text):
        if name == "response.function_call_arguments.done":
            # The interface's description has the name, and this client's types do not.
            fields = json.loads(data)
            assert fields.pop("name")
            data = json.dumps(fields)
        event = strictly(ResponseStreamEvent, data)
        assert event.type == name
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def refused(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json={"input": "x", **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def chat_text(client: httpx.AsyncClient, messages: Any, **fields: Any) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def test_a_response_is_what_a_chat_answers(client: httpx.AsyncClient) -> None:
    response = await respond(
        client, input="Tell me", instructions="Be brief.", metadata={"a": "b"}, model="tiny"
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Tell me"},
    ]
    assert response.output_text == await chat_text(client, messages)
    assert response.status in ("completed", "incomplete")
    assert (response.model, response.metadata) == ("tiny", {"a": "b"})
    assert (response.instructions, response.temperature) == ("Be brief.", 0)
    usage = response.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


async def test_items_are_the_messages_of_a_chat(client: httpx.AsyncClient) -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": "Hi"},
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "Hello", "annotations": []}],
        },
        {"role": "user", "content": "And now?"},
    ]
    response = await respond(client, input=items, instructions="You are it.")
    messages = [
        {"role": "system", "content": "You are it.\n\nBe brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ]
    assert response.output_text == await chat_text(client, messages)


async def test_the_oldest_turns_of_a_long_conversation_are_dropped(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    context = engine.model_info.max_model_len
    long = " ".join(["word"] * (context // 20))
    turns = [
        {"role": "user", "content": f"0 {long}"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": f"1 {long}"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "2 And now?"},
    ]
    system = {"role": "system", "content": "Be brief."}

    async def prompt_len(kept: list[dict[str, str]]) -> int:
        return len(await engine.tokenize([system, *kept], chat=ChatOptions()))

    lengths = [await prompt_len(turns[start:]) for start in (0, 2, 4)]
    for most in (lengths[0], lengths[0] - 1, lengths[1], lengths[1] - 1, lengths[2]):
        response = await respond(
            client,
            instructions="Be brief.",
            input=turns,
            truncation="auto",
            max_output_tokens=context - most,
        )
        assert response.usage is not None
        assert response.usage.input_tokens == max(n for n in lengths if n <= most)
    # A turn that is too long by itself loses its beginning, and what nobody limits gets a quarter.
    alone = await respond(
        client, input="word " * 2 * context, truncation="auto", max_output_tokens=None
    )
    assert alone.usage is not None
    assert alone.usage.input_tokens == context - context // 4
    assert alone.usage.output_tokens > 1


async def test_a_stream_has_every_event_in_order(client: httpx.AsyncClient) -> None:
    whole = await respond(client, input="Tell me")
    events = await stream(client, input="Tell me")
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    text = "".join(event.delta for event in events if event.type.endswith("output_text.delta"))
    assert text == whole.output_text
    assert events[-4].text == text
    last = events[-1].response
    assert last.output_text == text
    assert last.incomplete_details.reason == "max_output_tokens"
    assert events[0].response.status == "in_progress"
    assert last.id == events[0].response.id
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert last.usage.input_tokens == whole.usage.input_tokens


async def test_logprobs_come_when_they_are_included(client: httpx.AsyncClient) -> None:
    fields = {"input": "Tell me", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = await respond(client, **fields)
    (part,) = response.output[0].content
    assert len(part.logprobs) == response.usage.output_tokens
    assert len(part.logprobs[0].top_logprobs) == 2
    events = await stream(client, **fields)
    streamed = [e for event in events if event.type.endswith("text.delta") for e in event.logprobs]
    done = next(event for event in events if event.type.endswith("text.done"))
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in part.logprobs]
    assert len(streamed) <= len(done.logprobs)


async def test_a_next_turn_goes_on_from_a_stored_one(client: httpx.AsyncClient) -> None:
    first = await respond(client, input="One", instructions="Be brief.")
    second = await respond(client, input="Two", previous_response_id=first.id)
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Two"},
    ]
    # Instructions are those of one turn alone.
    assert second.output_text == await chat_text(client, messages)
    assert second.previous_response_id == first.id
    third = (await stream(client, input="Three", previous_response_id=second.id))[-1].response
    messages += [
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "Three"},
    ]
    assert third.output_text == await chat_text(client, messages)


async def test_items_are_referred_to(client: httpx.AsyncClient) -> None:
    first = await respond(client, input="One")
    user = {"role": "user", "content": "One"}
    two = {"role": "user", "content": "Two"}
    reference = {"type": "item_reference", "id": first.output[0].id}
    second = await respond(client, input=[user, reference, two])
    answer = {"role": "assistant", "content": first.output_text}
    assert second.output_text == (await respond(client, input=[user, answer, two])).output_text
    others = {"authorization": "Bearer other"}
    body = {**GREEDY, "input": [user, reference]}
    assert (await client.post(PATH, json=body, headers=others)).status_code == 400
    await client.delete(f"{PATH}/{first.id}")
    assert (await refused(client, input=[user, reference]))["param"] == "input[1].id"


def test_many_items_of_one_message_are_joined_once() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 2000}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    with own_time() as spent:
        request = ResponseRequest(input=[*[thought] * 4000, *[call] * 4000])
        (message,) = translate(request, [], lambda _: None, 0).turn
        # Joined over and over it took tens of seconds; the rest is for busy machines.
        assert spent() < 2.0
    assert message.reasoning_content == "\n".join(["x" * 2000] * 4000)
    assert len(message.tool_calls or ()) == 4000


def test_an_item_is_read_once_and_every_reference_to_it_counts() -> None:
    asked: list[str] = []
    logprobs = [ChatLogprob("a", -1.0, [97], [])] * 5000
    item = OutputMessage(
        id="msg_1", status="completed", content=[OutputText(text="x" * 100, logprobs=logprobs)]
    )

    def find(item_id: str) -> OutputMessage:
        asked.append(item_id)
        return item

    request = ResponseRequest(input=[{"type": "item_reference", "id": "msg_1"}] * 1000)
    turn = translate(request, [], find, 100_000).turn
    assert [message.content for message in turn] == ["x" * 100] * 1000
    assert asked == ["msg_1"]
    with pytest.raises(InvalidRequestError, match="99999 characters in all, got 100000") as refusal:
        translate(request, [], find, 99_999)
    assert refusal.value.param == "input[999].id"


async def test_a_stored_response_is_shown_and_forgotten(client: httpx.AsyncClient) -> None:
    response = await respond(client, input="One")
    path = f"{PATH}/{response.id}"
    shown = await client.get(path)
    assert strictly(Response, shown.content) == response
    cancelled = await client.post(f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["param"]) == (400, "response_id")
    assert strictly(Response, (await client.get(path)).content) == response
    deleted = await client.delete(path)
    assert deleted.json() == {"id": response.id, "object": "response", "deleted": True}
    for answer in (await client.get(path), await client.delete(path)):
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "response_id"
    error = await refused(client, previous_response_id=response.id)
    assert error["code"] == "previous_response_not_found"
    assert error["param"] == "previous_response_id"


async def test_what_is_not_to_be_stored_is_not(client: httpx.AsyncClient) -> None:
    response = await respond(client, input="One", store=False)
    assert (await client.get(f"{PATH}/{response.id}")).status_code == 404


async def test_others_do_not_see_it(client: httpx.AsyncClient) -> None:
    alice, bob = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
    answer = await client.post(PATH, json={**GREEDY, "input": "One"}, headers=alice)
    path = f"{PATH}/{answer.json()['id']}"
    assert (await client.get(path, headers=alice)).status_code == 200
    assert (await client.get(path, headers=bob)).status_code == 404
    assert (await client.delete(path, headers=bob)).status_code == 404
    again = {"input": "x", "previous_response_id": answer.json()["id"]}
    assert (await client.post(PATH, json=again, headers=bob)).status_code == 400


@pytest.fixture
def store(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> ResponseStore:
    """An empty one, instead of what other tests have filled."""
    store = ResponseStore()
    monkeypatch.setitem(app.state.server._kept, ResponseStore, store)
    return store


def bounded(app: Starlette, monkeypatch: pytest.MonkeyPatch, **bounds: int) -> None:
    config = app.state.server.config
    http = msgspec.structs.replace(config.http, **bounds)
    monkeypatch.setattr(app.state.server, "config", msgspec.structs.replace(config, http=http))


async def test_the_memory_is_bounded(
    client: httpx.AsyncClient,
    app: Starlette,
    store: ResponseStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 20_000
    bounded(app, monkeypatch, max_stored_response_bytes=limit)
    text = "x " * 300
    first = await respond(client, input=text, request_id="first")
    alone = store.size
    assert len(text) < alone < limit
    names = [first.id]
    for number in range(20):
        names.append((await respond(client, input=text, request_id=f"r{number}")).id)
        assert store.size <= limit
    # About as many as there is room for, and the newest ones.
    assert limit // alone - 2 <= len(store) < len(names)
    found = [(await client.get(f"{PATH}/{name}")).status_code for name in names]
    forgotten = len(names) - len(store)
    assert found == [404] * forgotten + [200] * len(store)
    assert (await refused(client, previous_response_id=first.id))["param"]
    for name in names[forgotten:]:
        await client.delete(f"{PATH}/{name}")
    assert (len(store), store.size) == (0, 0)


async def test_responses_that_are_too_large_or_too_many_are_not_kept(
    client: httpx.AsyncClient,
    app: Starlette,
    store: ResponseStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for bounds in ({"max_stored_response_bytes": 100}, {"max_stored_responses": 0}):
        bounded(app, monkeypatch, **bounds)
        response = await respond(client, input="One " * 20)
        assert (len(store), store.size) == (0, 0)
        assert (await client.get(f"{PATH}/{response.id}")).status_code == 404
        error = await refused(client, input="One " * 20, background=True)
        assert error["param"] == "background"
        monkeypatch.undo()
        monkeypatch.setitem(app.state.server._kept, ResponseStore, store)


async def test_responses_that_are_being_generated_count(
    client: httpx.AsyncClient,
    app: Starlette,
    engine: AsyncEngine,
    store: ResponseStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 10_000
    bounded(app, monkeypatch, max_stored_response_bytes=limit)
    done = await respond(client, input="One")
    body = {
        "input": "One",
        "background": True,
        "max_output_tokens": 900,
        "ignore_eos": True,
        "metadata": {f"k{index}": "y" * 500 for index in range(6)},
    }
    begun: list[str] = []
    while len(begun) < 10:
        answer = await client.post(PATH, json=body)
        if answer.status_code != 200:
            break
        begun.append(answer.json()["id"])
        assert 3000 * len(begun) < store.size <= limit
    # What is done makes room for them; they make none for each other.
    assert len(begun) == 3
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await client.get(f"{PATH}/{done.id}")).status_code == 404
    # Nor does one that is answered at once push them out.
    await respond(client, input="x " * 300)
    for name in begun:
        assert (await client.post(f"{PATH}/{name}/cancel")).json()["status"] == "cancelled"
    for _ in range(500):
        if not (engine.stats.num_running or store.num_running):
            break
        await anyio.sleep(0.01)
    assert (await respond(client, input="One", background=True)).status == "queued"
    assert store.size <= limit


async def test_a_response_in_the_background_is_asked_for_again(client: httpx.AsyncClient) -> None:
    begun = await respond(client, input="One", background=True)
    assert begun.status == "queued"
    for _ in range(500):
        response = strictly(Response, (await client.get(f"{PATH}/{begun.id}")).content)
        if response.status not in ("queued", "in_progress"):
            break
        await anyio.sleep(0.01)
    assert response.status == "incomplete"
    assert response.output_text == (await respond(client, input="One")).output_text
    assert (await respond(client, input="Two", previous_response_id=begun.id)).output


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 5}, "temperature"),
        ({"input": "word " * 4000}, "input"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ],
)
async def test_what_cannot_be_queued_is_refused_in_the_background_too(
    client: httpx.AsyncClient, store: ResponseStore, fields: dict[str, Any], param: str
) -> None:
    error = await refused(client, background=True, **fields)
    assert error["param"] == param
    assert (len(store), store.size) == (0, 0)
    await until(lambda: store.num_running == 0)


async def test_what_fails_in_the_background_says_so(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(submission: Submission) -> list[Any]:
        await anyio.sleep(0.01)
        raise EngineDeadError("out of memory")

    monkeypatch.setattr(Submission, "take", fails)
    begun = await respond(client, input="One", background=True)
    assert begun.status == "queued"
    for _ in range(500):
        failed = strictly(Response, (await client.get(f"{PATH}/{begun.id}")).content)
        if failed.status not in ("queued", "in_progress"):
            break
        await anyio.sleep(0.01)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.message == "the engine has stopped after an internal fault"


async def test_a_creator_that_leaves_before_it_is_queued_leaves_nothing(
    client: httpx.AsyncClient, store: ResponseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(*_: Any, **__: Any) -> list[int]:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(RequestBuilder, "tokenize", endless)
    asking = asyncio.create_task(respond(client, input="One", background=True))
    await until(lambda: len(store) == 1)
    asking.cancel()
    await until(lambda: (len(store), store.size, store.num_running) == (0, 0, 0))


async def test_a_stream_that_nobody_takes_is_cancelled_without_a_word(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write = Call.write

    async def deaf(call: Call, events: bytes) -> None:
        if b"output_text.delta" in events:
            raise ClientDisconnectedError
        await write(call, events)

    monkeypatch.setattr(Call, "write", deaf)
    with caplog.at_level(logging.WARNING, logger="src"):
        body = {**GREEDY, "input": "One", "stream": True, "request_id": "deaf"}
        # The transport misses the end of the answer.
        with pytest.raises(AssertionError):
            await client.post(PATH, json=body)
    assert not caplog.records
    shown = strictly(Response, (await client.get(f"{PATH}/resp_deaf")).content)
    assert (shown.status, shown.error) == ("cancelled", None)


async def test_a_response_in_the_background_is_cancelled(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    begun = await respond(
        client, input="One", background=True, max_output_tokens=900, ignore_eos=True
    )
    for _ in range(500):
        if engine.stats.num_running:
            break
        await anyio.sleep(0.01)
    cancelled = strictly(Response, (await client.post(f"{PATH}/{begun.id}/cancel")).content)
    assert cancelled.status == "cancelled"
    for _ in range(500):
        if not engine.stats.num_running:
            break
        await anyio.sleep(0.01)
    assert engine.stats.num_running == 0
    assert (await client.get(f"{PATH}/{begun.id}")).json()["status"] == "cancelled"
    error = await refused(client, previous_response_id=begun.id)
    assert error["param"] == "previous_response_id"


async def test_a_stream_is_cancelled_from_beside(
    app: Starlette, client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    name = "cancelled-from-beside"
    body = {"input": "One", "stream": True, "ignore_eos": True, "request_id": name}
    async with anyio.create_task_group() as tasks:
        texts: list[str] = []

        async def listen() -> None:
            texts.append((await client.post(PATH, json=body)).text)

        tasks.start_soon(listen)
        for _ in range(500):
            if (await client.get(f"{PATH}/resp_{name}")).status_code == 200:
                break
            await anyio.sleep(0.01)
        assert (await client.post(f"{PATH}/resp_{name}/cancel")).json()["status"] == "cancelled"
    kind, data = events_of(texts[0])[-1]
    assert kind == "response.failed"
    assert strictly(ResponseStreamEvent, data).response.status == "cancelled"
    assert engine.stats.num_running == 0


async def test_a_name_is_taken_once(client: httpx.AsyncClient) -> None:
    assert (await respond(client, input="x", request_id="mine")).id == "resp_mine"
    name = "resp_%?#;\\..~"
    assert (await respond(client, input="x", request_id=name.removeprefix("resp_"))).id == name
    assert (await client.get(f"{PATH}/{quote(name)}")).json()["id"] == name
    for fields in ({}, {"stream": True}, {"background": True}):
        assert (await refused(client, request_id="mine", **fields))["param"] == "request_id"


async def test_a_name_is_taken_once_by_requests_at_the_same_time(
    client: httpx.AsyncClient, store: ResponseStore, engine: AsyncEngine
) -> None:
    body = {**GREEDY, "input": "x", "request_id": "mine"}
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await client.post(PATH, json=body))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(ask)
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]
    assert (await client.get(f"{PATH}/resp_mine")).json()["status"] == "incomplete"
    assert len(store) == 1
    assert engine.stats.num_running == 0


async def test_a_name_is_its_owners(client: httpx.AsyncClient, store: ResponseStore) -> None:
    """Nobody learns from it, nor loses by it, that somebody else has one of the same name."""
    keys = [{"authorization": f"Bearer {name}"} for name in ("alice", "bob")]
    answers: dict[int, httpx.Response] = {}

    async def ask(index: int) -> None:
        body = {**GREEDY, "input": f"Say {index}", "request_id": "same"}
        answers[index] = await client.post(PATH, json=body, headers=keys[index])

    async with anyio.create_task_group() as tasks:
        for index in range(2):
            tasks.start_soon(ask, index)
    for index, headers in enumerate(keys):
        assert answers[index].status_code == 200
        shown = await client.get(f"{PATH}/resp_same", headers=headers)
        assert shown.content == answers[index].content
    await client.delete(f"{PATH}/resp_same", headers=keys[0])
    assert (await client.get(f"{PATH}/resp_same", headers=keys[0])).status_code == 404
    assert (await client.get(f"{PATH}/resp_same", headers=keys[1])).status_code == 200


async def test_the_model_calls_a_function(demo: httpx.AsyncClient) -> None:
    fields = {"input": ASKS_WEATHER, "tools": [WEATHER], "max_output_tokens": 60}
    response = await respond(demo, **fields)
    calls = [item for item in response.output if item.type == "function_call"]
    assert response.status == "completed"
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    assert response.tools[0].name == "get_weather"
    events = await stream(demo, **fields)
    kinds = [event.type for event in events]
    deltas = kinds.count("response.function_call_arguments.delta")
    assert kinds[kinds.index("response.function_call_arguments.delta") - 1] == (
        "response.output_item.added"
    )
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    streamed = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(streamed) == calls[0].arguments == events[-3].arguments
    assert deltas >= 1
    # The call and its result go into the next turn.
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "21 degrees"}
    following = await respond(
        demo, input=[result], previous_response_id=response.id, tools=[WEATHER]
    )
    by_hand = await respond(
        demo,
        input=[
            {"role": "user", "content": ASKS_WEATHER},
            {
                "type": "function_call",
                "call_id": calls[0].call_id,
                "name": calls[0].name,
                "arguments": calls[0].arguments,
            },
            result,
        ],
        tools=[WEATHER],
    )
    assert following.output_text == by_hand.output_text


async def test_a_named_function_is_called(demo: httpx.AsyncClient) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        response = await respond(
            demo, input="Hello", tools=[WEATHER], tool_choice=choice, max_output_tokens=60
        )
        (call,) = response.output
        assert (call.type, call.name) == ("function_call", "get_weather")


async def test_tools_that_run_elsewhere_are_passed_over(demo: httpx.AsyncClient) -> None:
    tools = [
        {"type": "web_search"},
        {"type": "namespace", "name": "city", "description": "Cities", "tools": [WEATHER]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    ]
    response = await respond(demo, input=ASKS_WEATHER, tools=tools, max_output_tokens=60)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, call.namespace) for call in calls] == [("get_weather", "city")]
    assert [tool.type for tool in response.tools] == ["namespace"]
    answer = await demo.post(PATH, json={**GREEDY, "input": "x", "tools": [{"type": "newest"}]})
    assert answer.status_code == 200


async def test_the_text_has_the_form_that_was_asked_for(demo: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = await respond(
        demo, input="Tell me of Paris", text={"format": form}, max_output_tokens=80
    )
    parsed = json.loads(response.output_text)
    assert set(parsed) == {"city", "warm"}
    assert response.text.format.type == "json_schema"


async def test_what_agents_send_is_taken(demo: httpx.AsyncClient) -> None:
    response = await respond(
        demo,
        input=[
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Be brief."}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "<environment_context/>"}],
            },
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "encrypted_content": "AAAA",
                "content": None,
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
        instructions="You are a coding agent.",
        tools=[WEATHER, {"type": "web_search", "external_web_access": False}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="a-b-c",
        text={"verbosity": "low"},
        service_tier="auto",
        client_metadata={"x": "y"},
    )
    assert response.output


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
         "input[0].content[0].text"),
        ({"input": [{"type": "later_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": "word " * 4000}, "input"),
        ({"input": [{"content": [{}] * 1100, "output": [{}] * 1000}] * 2}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "x"}] * 512}]}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"background": True, "stream": True, "store": False}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"truncation": "middle"}, "truncation"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a/b"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
    ],
)  # fmt: skip
async def test_bad_requests(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    for streams in (False, True):
        if "stream" in fields and not streams:
            continue
        error = await refused(client, **{"stream": streams, **fields})
        assert error["param"] == param, error
        assert len(error["message"]) < 500


async def test_the_official_client_reads_it(app: Starlette) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), timeout=60)
    async with openai.AsyncOpenAI(
        base_url="http://slipstream/v1", api_key="none", http_client=http, max_retries=0
    ) as official:
        whole = await official.responses.create(
            model="tiny", input="Tell me", temperature=0, max_output_tokens=12
        )
        async with official.responses.stream(
            model="tiny", input="Tell me", temperature=0, max_output_tokens=12
        ) as events:
            kinds = [event.type async for event in events]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.incomplete"
        assert (await official.responses.retrieve(whole.id)).output_text == whole.output_text
        await official.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            await official.responses.retrieve(whole.id)
