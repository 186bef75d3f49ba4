"""Streams, and that they say what a whole answer says: usage, stop strings, scores, seeds.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.http.strict import events_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
# The model answers with a call, which is text where no tools are given.
ASKS_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
# Families of emoji, Hangul and ideographs: a character is several tokens of this model.
WIDE = "👩‍👩‍👧 삼겹살 日本"


async def whole(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def streamed(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    *events, (_, done) = events_of(answer.text)
    assert done == "[DONE]"
    return [json.loads(data) for _, data in events]


def choices_of(events: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def text_of(choices: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in choices)


# The form of a stream


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": ["Paris"]},
        {"max_tokens": 3},
        {"max_tokens": 1},
        {"logprobs": True},
        {"tools": [{"type": "function", "function": ADD}], "tool_choice": "required"},
    ],
    ids=["whole", "stop", "length", "one token", "logprobs", "call"],
)
async def test_the_reason_comes_in_a_chunk_of_its_own_with_nothing_beside_it(
    demo_client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    asked = {"messages": ASKS_WEATHER, "temperature": 0, "max_tokens": 60, **fields}
    *before, last = choices_of(await streamed(demo_client, CHAT, **asked))
    assert last["delta"] == {}
    assert last["finish_reason"] in ("stop", "length", "tool_calls")
    # It is null before and not missing, nor an empty text.
    assert {choice["finish_reason"] for choice in before} == {None}
    assert before[0]["delta"] == {"role": "assistant", "content": ""}
    (choice,) = (await whole(demo_client, CHAT, **asked))["choices"]
    assert text_of(before) == (choice["message"]["content"] or "")
    assert (last["finish_reason"], last["stop_reason"]) == (
        choice["finish_reason"],
        choice["stop_reason"],
    )


async def test_each_of_several_answers_has_its_role_its_index_and_its_end(
    demo_client: httpx.AsyncClient,
) -> None:
    asked = {"messages": ASKS_WEATHER, "n": 3, "max_tokens": 4, "seed": 1, "temperature": 1}
    events = await streamed(demo_client, CHAT, **asked, stream_options={"include_usage": True})
    for event in events:
        ChatCompletionChunk.model_validate(event)
    body = await whole(demo_client, CHAT, **asked)
    for index in range(3):
        choices = choices_of(events, index)
        roles = [choice["delta"].get("role") for choice in choices]
        assert roles == ["assistant", *[None] * (len(roles) - 1)]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [*[None] * (len(reasons) - 1), "length"]
        assert text_of(choices) == body["choices"][index]["message"]["content"]
    # The prompt counts once, and the answers each.
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == body["usage"]["completion_tokens"] == 12
    assert last["usage"]["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    for name in ("id", "created", "model", "object"):
        assert len({event[name] for event in events}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_comes_only_where_it_is_asked_for(
    demo_client: httpx.AsyncClient, options: dict[str, Any] | None
) -> None:
    for path, asked in ((CHAT, {"messages": ASKS_WEATHER}), (COMPLETIONS, {"prompt": "a"})):
        events = await streamed(
            demo_client, path, **asked, max_tokens=2, temperature=0, stream_options=options
        )
        assert not any("usage" in event for event in events)
        assert all(event["choices"] for event in events)


async def test_usage_of_several_prompts_is_their_sum(demo_client: httpx.AsyncClient) -> None:
    asked = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "n": 2}
    alone = [
        (await whole(demo_client, COMPLETIONS, prompt=text, **asked))["usage"]
        for text in ("a b", "a b c d")
    ]
    both = await whole(demo_client, COMPLETIONS, prompt=["a b", "a b c d"], **asked)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert both["usage"][name] == sum(usage[name] for usage in alone)
    assert both["usage"]["completion_tokens"] == 12
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]


async def test_calls_have_an_index_an_id_and_a_name_once_each(
    demo_client: httpx.AsyncClient,
) -> None:
    events = await streamed(
        demo_client,
        CHAT,
        messages=ASKS_WEATHER,
        tools=[{"type": "function", "function": ADD}],
        tool_choice="required",
        n=2,
        seed=5,
        max_tokens=150,
    )
    seen = set()
    for index in range(2):
        arguments: dict[int, str] = {}
        for choice in choices_of(events, index):
            for call in choice["delta"].get("tool_calls", ()):
                if call["index"] not in arguments:
                    assert call["index"] == len(arguments)
                    assert (call["type"], call["function"]["name"]) == ("function", "add")
                    seen.add(call["id"])
                    arguments[call["index"]] = ""
                else:
                    assert "id" not in call
                    assert "name" not in call["function"]
                arguments[call["index"]] += call["function"]["arguments"]
        assert arguments
        if choices_of(events, index)[-1]["finish_reason"] == "tool_calls":
            assert all(isinstance(json.loads(text), dict) for text in arguments.values())
    # No two calls of a request have one id.
    assert len(seen) >= 2


async def test_a_block_of_a_message_is_closed_before_the_next_one_opens(
    demo_client: httpx.AsyncClient,
) -> None:
    answer = await demo_client.post(
        MESSAGES,
        json={
            "messages": ASKS_WEATHER,
            "tools": [{"name": "add", "input_schema": ADD["parameters"]}],
            "tool_choice": {"type": "any"},
            "temperature": 0,
            "max_tokens": 60,
            "stream": True,
        },
    )
    events = [json.loads(data) for _, data in events_of(answer.text)]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    opened = None
    count = 0
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert opened is None
            opened, count = event["index"], count + 1
            assert event["index"] == count - 1
            assert event["content_block"]["type"] == "tool_use"
            # The input grows by deltas and begins as an object.
            assert event["content_block"]["input"] == {}
        else:
            assert event["index"] == opened
            opened = None if event["type"] == "content_block_stop" else opened
    assert (opened, count) == (None, 1)
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


# Stop strings


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["Pariszzz"], None),
        (["Paris", 'Paris"'], '<tool_call>\n{"name": "weather", "arguments": {"place": "'),
        (['ris"}}\n', 'ris"}}'], '<tool_call>\n{"name": "weather", "arguments": {"place": "Pa'),
        (['>\n{"name', '\n{"nameX'], "<tool_call"),
        (['place": "P'], '<tool_call>\n{"name": "weather", "arguments": {"'),
        (["<"], ""),
        # Its beginning is the end of the answer, which is held and then let go.
        (["</tool_call>\nmore"], None),
    ],
    ids=["never", "prefix", "longer first", "two began", "over tokens", "at once", "held"],
)
async def test_text_before_a_stop_string_is_whole_and_text_of_it_is_never_seen(
    demo_client: httpx.AsyncClient, stop: list[str], text: str | None
) -> None:
    asked = {"messages": ASKS_WEATHER, "temperature": 0, "max_tokens": 40, "logprobs": True}
    free = await whole(demo_client, CHAT, **asked)
    expected = free["choices"][0]["message"]["content"] if text is None else text
    body = await whole(demo_client, CHAT, **asked, stop=stop)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == expected
    choices = choices_of(await streamed(demo_client, CHAT, **asked, stop=stop))
    assert text_of(choices) == expected
    assert choices[-1]["stop_reason"] == (None if text is None else choice["stop_reason"])
    # Tokens that were held have lost neither their log-probabilities nor their order.
    scored = [
        entry for piece in choices if piece["logprobs"] for entry in piece["logprobs"]["content"]
    ]
    assert scored == choice["logprobs"]["content"]
    assert len(scored) == body["usage"]["completion_tokens"]


@pytest.mark.parametrize("least", [0, 1, 4])
async def test_an_end_that_is_all_but_certain_waits_for_the_least_number_of_tokens(
    demo_client: httpx.AsyncClient, least: int
) -> None:
    eos = (await whole(demo_client, "/tokenize", prompt="<|end|>", add_special_tokens=False))[
        "tokens"
    ]
    body = await whole(
        demo_client,
        COMPLETIONS,
        prompt="a",
        max_tokens=16,
        min_tokens=least,
        temperature=0,
        logit_bias={str(eos[0]): 100},
    )
    # The end is a token too.
    assert body["usage"]["completion_tokens"] == least + 1
    assert body["choices"][0]["finish_reason"] == "stop"


# Characters of several tokens


async def test_a_character_is_whole_however_a_stream_is_cut(
    demo_client: httpx.AsyncClient,
) -> None:
    asked = {"prompt": "x", "temperature": 0, "guided_choice": [WIDE]}
    events = await streamed(demo_client, COMPLETIONS, **asked, max_tokens=80)
    texts = [choice["text"] for event in events for choice in event["choices"]]
    assert "".join(texts) == WIDE
    assert not any("\ufffd" in text for text in texts)
    for most in range(1, 9):
        # Where the limit cuts a character, both ways of asking say so alike.
        body = await whole(demo_client, COMPLETIONS, **asked, max_tokens=most)
        events = await streamed(demo_client, COMPLETIONS, **asked, max_tokens=most)
        cut = "".join(choice["text"] for event in events for choice in event["choices"])
        assert cut == body["choices"][0]["text"]
        assert WIDE.startswith(cut.rstrip("\ufffd"))


# Log-probabilities


@pytest.mark.parametrize("prompt", ["The cat sat", [1, 5, 9, 300], "é日本🙂 ok"], ids=str)
@pytest.mark.parametrize("most", [0, 6])
async def test_an_echo_is_scored_alike_in_a_stream_and_at_once(
    demo_client: httpx.AsyncClient, prompt: Any, most: int
) -> None:
    asked = {"prompt": prompt, "max_tokens": most, "temperature": 0, "logprobs": 2, "echo": True}
    body = await whole(demo_client, COMPLETIONS, **asked)
    (choice,) = body["choices"]
    events = await streamed(demo_client, COMPLETIONS, **asked)
    pieces = choices_of(events)
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    for name, column in choice["logprobs"].items():
        joined = [
            entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"][name]
        ]
        assert joined == column
        assert len(column) == body["usage"]["total_tokens"]
    # Evaluations look for where an answer begins by its characters.
    assert choice["logprobs"]["token_logprobs"][0] is None
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    if most:
        echoed = choice["text"][: offsets[body["usage"]["prompt_tokens"]]]
        assert choice["text"].startswith(echoed)
        assert echoed
        if isinstance(prompt, str):
            assert echoed == prompt


async def test_as_many_of_the_likeliest_are_named_as_were_asked_for(
    demo_client: httpx.AsyncClient,
) -> None:
    # Pieces of characters decode to the same replacement: none of them takes another's place.
    body = await whole(
        demo_client,
        COMPLETIONS,
        prompt="🙂é日",
        max_tokens=12,
        temperature=2,
        logprobs=20,
        seed=3,
        ignore_eos=True,
    )
    columns = body["choices"][0]["logprobs"]
    for token, top in zip(columns["tokens"], columns["top_logprobs"], strict=True):
        assert len(top) in (20, 21)
        assert token in top
        assert all(-10_000 < value <= 0 for value in top.values())


async def test_positions_have_candidates_of_their_own(demo_client: httpx.AsyncClient) -> None:
    asked = {"messages": ASKS_WEATHER, "temperature": 0, "max_tokens": 8, "logprobs": True}
    body = await whole(demo_client, CHAT, **asked, top_logprobs=3)
    entries = body["choices"][0]["logprobs"]["content"]
    for entry in entries:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        # Greedy: what was chosen is the likeliest, with the same number.
        first = entry["top_logprobs"][0]
        assert (first["token"], first["logprob"]) == (entry["token"], entry["logprob"])
        assert bytes(first["bytes"]).decode(errors="replace")
    assert len({json.dumps(entry["top_logprobs"]) for entry in entries}) == len(entries)


async def test_a_cached_prefix_changes_no_score(demo_client: httpx.AsyncClient) -> None:
    prompt = "The quick brown fox jumps over the lazy dog and runs away. " * 3
    asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    for fields in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}):
        cold = await whole(demo_client, COMPLETIONS, **asked, **fields, cache_salt=str(fields))
        await whole(demo_client, COMPLETIONS, **asked)
        warm = await whole(demo_client, COMPLETIONS, **asked, **fields)
        assert warm["choices"] == cold["choices"]
        assert warm["usage"]["prompt_tokens"] == cold["usage"]["prompt_tokens"]


# Seeds


async def test_a_seed_says_the_same_beside_requests_without_one(
    demo_client: httpx.AsyncClient,
) -> None:
    asked = {"prompt": "Tell", "max_tokens": 12, "temperature": 1, "ignore_eos": True}
    alone = await whole(demo_client, COMPLETIONS, **asked, seed=42)
    crowd = await asyncio.gather(
        whole(demo_client, COMPLETIONS, **asked, seed=42),
        *(whole(demo_client, COMPLETIONS, **asked) for _ in range(4)),
        *(whole(demo_client, COMPLETIONS, **asked, seed=seed) for seed in range(3)),
    )
    texts = [body["choices"][0]["text"] for body in crowd]
    assert texts[0] == alone["choices"][0]["text"]
    assert len(set(texts)) > 4
