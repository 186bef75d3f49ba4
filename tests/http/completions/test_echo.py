"""A prompt that ends inside a character, repeated before what goes on from there."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from src.engine.client import AsyncEngine
from tests.http.strict import events_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

# The first bytes of "é" and of "🙂", and what may follow them: the names are tokens of one byte.
BEGINNINGS = {"é": ["Ã"], "🙂": ["ð", "Ł", "ĺ"]}
ENDINGS = {"é": "©", "🙂": "Ĥ"}


async def answers(client: httpx.AsyncClient, **fields: Any) -> tuple[list[dict[str, Any]], Any]:
    """The choices of a whole answer, and of the same one streamed and joined."""
    body = {"model": "tiny", "temperature": 0, "echo": True, **fields}
    whole = await client.post("/v1/completions", json=body)
    assert whole.status_code == 200, whole.text
    streamed = await client.post("/v1/completions", json=body | {"stream": True})
    joined: dict[int, str] = {}
    for _, data in events_of(streamed.text):
        if data != "[DONE]":
            choice = json.loads(data)["choices"][0]
            joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    choices: list[dict[str, Any]] = whole.json()["choices"]
    assert joined == {choice["index"]: choice["text"] for choice in choices}
    return choices, joined


def ids_of(engine: AsyncEngine, *names: str) -> list[int]:
    ids = [engine.tokenizer.token_to_id(name) for name in names]
    assert None not in ids
    return [i for i in ids if i is not None]


@pytest.mark.parametrize("character", BEGINNINGS)
@pytest.mark.parametrize("n", [1, 2])
async def test_each_byte_is_there_once(
    client: httpx.AsyncClient, engine: AsyncEngine, character: str, n: int
) -> None:
    begun = ids_of(engine, *BEGINNINGS[character])
    prompt = engine.tokenizer.encode("Hi ", False) + begun
    ending, letter = ids_of(engine, ENDINGS[character], "a")
    fields = {"prompt": prompt, "max_tokens": 1, "n": n}
    for following in (ending, letter):
        choices, _ = await answers(client, **fields, allowed_token_ids=[following])
        pieces = [engine.tokenizer.token_bytes(i) for i in (*prompt, following)]
        want = b"".join(pieces).decode(errors="replace")
        assert [choice["text"] for choice in choices] == [want] * n
    assert want == "Hi \ufffda"


async def test_log_probabilities_have_their_places(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    prompt = engine.tokenizer.encode("Hi", False) + ids_of(engine, "Ã")
    following = ids_of(engine, "©")
    fields = {"prompt": prompt, "max_tokens": 2, "logprobs": 0, "allowed_token_ids": following}
    ((choice,), _) = await answers(client, **fields)
    assert choice["text"] == "Hié\ufffd"
    assert choice["logprobs"]["text_offset"][-3:] == [2, 2, 3]


async def test_what_does_not_go_on_leaves_the_character_to_the_prompt(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    prompt = engine.tokenizer.encode("Hi", False) + ids_of(engine, "Ã")
    end, following = engine.tokenizer.eos_token_id, ids_of(engine, "©")
    cases: list[tuple[dict[str, Any], str]] = [
        # Nothing follows: no token, or one that has no text.
        ({"max_tokens": 0}, "Hi\ufffd"),
        ({"max_tokens": 0, "logprobs": 1}, "Hi\ufffd"),
        ({"max_tokens": 3, "allowed_token_ids": [end]}, "Hi\ufffd"),
        ({"max_tokens": 3, "allowed_token_ids": [end], "n": 2}, "Hi\ufffd"),
        (
            {"max_tokens": 3, "stop_token_ids": following, "allowed_token_ids": following},
            "Hi\ufffd",
        ),
        # A text that has a form of its own stands alone.
        ({"max_tokens": 3, "structured_outputs": {"regex": "a"}}, "Hi\ufffda"),
        # The stop string takes the character.
        ({"max_tokens": 3, "allowed_token_ids": following, "stop": ["é"]}, "Hi"),
        # Not repeated, it is the output's.
        ({"max_tokens": 1, "allowed_token_ids": following, "echo": False}, "é"),
    ]
    for fields, want in cases:
        choices, _ = await answers(client, prompt=prompt, **fields)
        assert {choice["text"] for choice in choices} == {want}, fields


async def test_each_of_several_prompts_has_its_own_end(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    whole = engine.tokenizer.encode("Hi", False)
    following = ids_of(engine, "©")
    prompts = [whole, whole + ids_of(engine, "Ã")]
    fields = {"max_tokens": 1, "allowed_token_ids": following}
    choices, _ = await answers(client, prompt=prompts, **fields)
    assert [choice["text"] for choice in choices] == ["Hi\ufffd", "Hié"]
