"""Thinking over HTTP: budgets in every protocol, stop strings, what counts as reasoning."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from starlette.applications import Starlette

from src.core.config import ChatSection, Config
from src.engine.client import AsyncEngine
from src.http import create_app
from src.http.generation.thinking import thinking_behind
from src.text import Tokenizer
from tests.http.asking import client_of
from tests.http.strict import events_of, strictly
from tests.support import tokenizers

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hello"}
TAG = "</think>"
MOST = 40


@pytest.fixture(scope="module")
async def thinking_app(config: Config, anyio_backend: str) -> AsyncIterator[Starlette]:
    """The small model, whose every answer begins with thinking."""
    chat = ChatSection(reasoning_parser="deepseek_r1", request_templates="kwargs")
    app = create_app(msgspec.structs.replace(config, chat=chat), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server._engine.wait_ready()
        yield app


@pytest.fixture
async def thinking(thinking_app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(thinking_app) as client:
        yield client


@pytest.fixture
async def tokenizer(thinking_app: Starlette) -> Any:
    engine: AsyncEngine = await thinking_app.state.server.ready_engine()
    return engine.tokenizer


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json={"temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message of an answer, and the usage."""
    fields.setdefault("max_tokens", MOST)
    body = await post(client, CHAT, messages=[USER], **fields)
    return body["choices"][0], body["usage"]


async def test_a_chat_thinks_for_as_many_tokens_as_it_may(
    thinking: httpx.AsyncClient, tokenizer: Any
) -> None:
    tag = tokenizer.encode(TAG, add_special_tokens=False)
    free, usage = await chat(thinking, return_token_ids=True)
    assert free["message"]["content"] is None
    assert usage["completion_tokens_details"] == {"reasoning_tokens": MOST}
    for budget in (0, 1, 5, 12):
        fields = {"thinking_token_budget": budget, "return_token_ids": True}
        choice, usage = await chat(thinking, **fields)
        token_ids = choice["token_ids"]
        assert token_ids[:budget] == free["token_ids"][:budget]
        assert token_ids[budget : budget + len(tag)] == tag
        assert usage["completion_tokens_details"] == {"reasoning_tokens": budget}
        assert usage["completion_tokens"] == len(token_ids) == MOST
        thought = tokenizer.decode(token_ids[:budget]).strip(" \t\r\n")
        assert (choice["message"].get("reasoning") or "") == thought
        answer = tokenizer.decode(token_ids[budget + len(tag) :]).lstrip(" \t\r\n")
        assert choice["message"]["content"] == answer
        # And so it is streamed.
        pieces, streamed = await streamed_chat(thinking, thinking_token_budget=budget)
        assert "".join(p.get("reasoning") or "" for p in pieces) == thought
        assert "".join(p.get("content") or "" for p in pieces) == answer
        assert streamed == usage


async def streamed_chat(
    client: httpx.AsyncClient, **fields: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    body = {"messages": [USER], "temperature": 0, "ignore_eos": True, "max_tokens": MOST}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post(CHAT, json={**body, **options, **fields})
    events = [json.loads(data) for _, data in events_of(answer.text) if data != "[DONE]"]
    pieces = [choice["delta"] for event in events for choice in event["choices"]]
    return pieces, events[-1]["usage"]


async def test_each_choice_of_a_chat_has_the_budget(thinking: httpx.AsyncClient) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 1, "max_tokens": MOST}
    body = await post(
        thinking, CHAT, messages=[USER], thinking_token_budget=4, **fields, stream=False
    )
    assert all(choice["message"]["content"] for choice in body["choices"])
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


async def test_any_number_is_asked_for_as_vllm_does(thinking: httpx.AsyncClient) -> None:
    assert await chat(thinking, thinking_token_budget=-1) == await chat(thinking)


async def test_a_budget_in_the_other_protocols(thinking: httpx.AsyncClient) -> None:
    wanted, _ = await chat(thinking, thinking_token_budget=6)
    thought, answer = (wanted["message"][name] for name in ("reasoning", "content"))
    response = await post(
        thinking, RESPONSES, input="hello", max_output_tokens=MOST, thinking_token_budget=6
    )
    reasoning, message = response["output"]
    assert reasoning["content"][0]["text"] == thought
    assert message["content"][0]["text"] == answer
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}
    asked: dict[str, Any] = {
        "max_tokens": MOST,
        "messages": [USER],
        "temperature": 0,
        "ignore_eos": True,
        "thinking": {"type": "enabled", "budget_tokens": 6},
    }
    said = strictly(Message, (await thinking.post(MESSAGES, json=asked)).content)
    kinds = {block.type: block for block in said.content}
    assert (kinds["thinking"].thinking, kinds["text"].text) == (thought, answer)
    streamed = (await thinking.post(MESSAGES, json={**asked, "stream": True})).text
    events = [
        strictly(RawMessageStreamEvent, d) for name, d in events_of(streamed) if name != "ping"
    ]
    pieces = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(p.thinking for p in pieces if p.type == "thinking_delta") == thought
    assert "".join(p.text for p in pieces if p.type == "text_delta") == answer
    # Whoever does not want it to think has no budget.
    body = await post(thinking, MESSAGES, **{**asked, "thinking": {"type": "disabled"}})
    assert [block["type"] for block in body["content"]] == ["thinking"]


async def test_the_openai_client_asks_for_a_budget(
    thinking: httpx.AsyncClient, thinking_app: Starlette
) -> None:
    wanted, _ = await chat(thinking, thinking_token_budget=6)
    transport = httpx.ASGITransport(thinking_app)
    async with openai.AsyncOpenAI(
        base_url="http://slipstream/v1",
        api_key="x",
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        answer = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            temperature=0,
            max_tokens=MOST,
            extra_body={"thinking_token_budget": 6, "ignore_eos": True},
        )
    assert answer.choices[0].message.content == wanted["message"]["content"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6


async def test_a_completion_has_a_budget_where_it_thinks(
    thinking: httpx.AsyncClient, tokenizer: Any
) -> None:
    tag = tokenizer.encode(TAG, add_special_tokens=False)
    asked = {"max_tokens": 30, "return_token_ids": True, "thinking_token_budget": 3}
    prompts = ["Well.\n<think>\nLet me", "<think>a</think> So", "one"]
    body = await post(thinking, COMPLETIONS, prompt=prompts, **asked)
    opened, closed, implied = (choice["token_ids"] for choice in body["choices"])
    assert opened[3 : 3 + len(tag)] == implied[3 : 3 + len(tag)] == tag
    assert TAG not in body["choices"][1]["text"]
    free = await post(
        thinking, COMPLETIONS, prompt=prompts[1], **{**asked, "thinking_token_budget": -1}
    )
    assert free["choices"][0]["token_ids"] == closed


def test_tags_that_are_special_tokens_are_part_of_a_completion() -> None:
    # Others share the one that is made once.
    source = copy.deepcopy(tokenizers.byte_level())
    source.add_special_tokens(["[THINK]", "[/THINK]"])
    tokenizer = Tokenizer(source)
    settings = ChatSection(reasoning_parser="mistral")
    prompt = tokenizer.encode("Well. [THINK]", add_special_tokens=False)
    thinking, kept = thinking_behind(tokenizer, settings, prompt, 3)
    assert thinking.is_open
    assert set(kept) == {tokenizer.token_to_id("[THINK]"), tokenizer.token_to_id("[/THINK]")}


async def test_a_form_leaves_a_completion_no_place_for_thinking(
    thinking: httpx.AsyncClient,
) -> None:
    body = {"prompt": "<think>", "guided_json": {"type": "object"}, "thinking_token_budget": 5}
    answer = await thinking.post(COMPLETIONS, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"
    grammar = {"guided_grammar": 'start: "yes" | "no"', "thinking_token_budget": 5}
    answer = await thinking.post(CHAT, json={"messages": [USER], **grammar})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"


async def test_a_budget_is_a_number(thinking: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    for path, body in (
        (CHAT, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "x"}),
        (RESPONSES, {"input": "x"}),
    ):
        for value in (-2, 1.5, "3", True, 2**64):
            answer = await thinking.post(path, json={**body, "thinking_token_budget": value})
            assert answer.status_code == 400, (path, value)
            assert answer.json()["error"]["param"] == "thinking_token_budget"
    for value in (-1, 1.5, 2**64):
        budget = {"type": "enabled", "budget_tokens": value}
        body = {"messages": [USER], "max_tokens": 9, "thinking": budget}
        answer = await thinking.post(MESSAGES, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("thinking.budget_tokens")


async def test_a_budget_where_nobody_knows_what_is_thought(client: httpx.AsyncClient) -> None:
    for path, body in (
        (CHAT, {"messages": [USER]}),
        (COMPLETIONS, {"prompt": "x"}),
        (RESPONSES, {"input": "x"}),
    ):
        answer = await client.post(path, json={**body, "thinking_token_budget": 5})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "thinking_token_budget"
        assert error["code"] == "unsupported_parameter"
    # Anthropic's clients ask every model.
    body = {
        "messages": [USER],
        "max_tokens": 5,
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    assert (await client.post(MESSAGES, json=body)).status_code == 200


async def test_stop_strings_are_for_the_answer(thinking: httpx.AsyncClient) -> None:
    free, _ = await chat(thinking, thinking_token_budget=12)
    thought, answer = free["message"]["reasoning"], free["message"]["content"]
    stop = next(character for character in thought if character in answer.strip())
    assert stop.strip()
    choice, _ = await chat(thinking, thinking_token_budget=12, stop=[stop])
    assert choice["message"]["reasoning"] == thought
    assert (choice["message"]["content"] or "") == answer[: answer.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    body = await post(
        thinking,
        MESSAGES,
        messages=[USER],
        max_tokens=MOST,
        stop_sequences=[stop],
        thinking={"type": "enabled", "budget_tokens": 12},
    )
    assert body["content"][0]["thinking"] == thought
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    # Without an answer they never count.
    choice, _ = await chat(thinking, stop=[stop])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)


async def test_a_forced_call_comes_behind_the_thinking(thinking: httpx.AsyncClient) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {}}}}
    choice, usage = await chat(
        thinking,
        max_tokens=200,
        ignore_eos=False,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        thinking_token_budget=8,
    )
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    tokens = usage["completion_tokens_details"]["reasoning_tokens"]
    # A character that has begun is completed.
    assert 8 <= tokens <= 11
    assert choice["finish_reason"] == "tool_calls"
