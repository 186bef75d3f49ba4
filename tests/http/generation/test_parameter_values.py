"""Parameters within the published ranges, and fields that change nothing.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.http.asking import (
    ASKS_WEATHER,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    post,
    refused,
)

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# Sampling parameters within the published ranges


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_top_p_of_0_takes_the_likeliest_token(
    demo_client: httpx.AsyncClient, path: str
) -> None:
    asked: dict[str, Any] = {"temperature": 2, "top_p": 0}
    texts = set()
    for seed in range(4):
        if path == RESPONSES:
            body = {"input": "Tell me", "max_output_tokens": 16, "seed": seed, **asked}
            answer = await post(demo_client, path, **body)
            texts.add(answer["output"][0]["content"][0]["text"])
        else:
            messages = [{"role": "user", "content": "Tell me"}]
            answer = await post(
                demo_client, path, messages=messages, max_tokens=16, seed=seed, **asked
            )
            if path == CHAT:
                texts.add(answer["choices"][0]["message"]["content"])
            else:
                texts.add(answer["content"][0]["text"])
    assert len(texts) == 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 5e-324])
async def test_a_temperature_next_to_0_is_greedy_and_no_nan(
    demo_client: httpx.AsyncClient, temperature: float
) -> None:
    asked = {"messages": ASKS_WEATHER, "max_tokens": 12, "logprobs": True}
    greedy = await post(demo_client, CHAT, temperature=0, **asked)
    answer = await post(demo_client, CHAT, temperature=temperature, seed=1, **asked)
    assert answer["choices"] == greedy["choices"]
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": -1},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"top_k": 0},
        {"top_k": -1},
        {"stop": []},
        {"stop": None},
        # What an editor sends for every completion.
        {"stop": [f"<|{name}|>" for name in "abcdefghijklmn"]},
        {"logit_bias": {}},
        {"tools": []},
        {"top_logprobs": 0},
    ],
    ids=str,
)
async def test_values_that_change_nothing_are_taken(
    demo_client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    await post(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=1, **fields)


async def test_null_is_as_if_a_field_were_not_there(demo_client: httpx.AsyncClient) -> None:
    names = (
        "temperature top_p n stop seed max_completion_tokens presence_penalty frequency_penalty "
        "logit_bias logprobs top_logprobs tools tool_choice response_format user stream "
        "stream_options parallel_tool_calls metadata store service_tier reasoning_effort "
        "modalities audio prediction functions function_call verbosity web_search_options model"
    )
    asked = {"messages": ASKS_WEATHER, "max_tokens": 2, "temperature": 0}
    plain = await post(demo_client, CHAT, **asked)
    nulls = await post(demo_client, CHAT, **{**dict.fromkeys(names.split()), **asked})
    assert nulls["choices"] == plain["choices"]
    assert nulls["usage"]["completion_tokens"] == 2


async def test_fields_of_a_message_that_nobody_knows_are_passed_over(
    demo_client: httpx.AsyncClient,
) -> None:
    asked = {"max_tokens": 4, "temperature": 0}
    plain = await post(demo_client, CHAT, messages=ASKS_WEATHER, **asked)
    more = {"id": 1947269257, "opts": {"visible": False}, "refusal": None, "annotations": []}
    answer = await post(demo_client, CHAT, messages=[{**ASKS_WEATHER[0], **more}], **asked)
    assert answer["choices"] == plain["choices"]


async def test_a_rendered_conversation_begins_once(demo_client: httpx.AsyncClient) -> None:
    tokens = (await post(demo_client, "/tokenize", messages=ASKS_WEATHER))["tokens"]
    bos = (await post(demo_client, "/tokenize", prompt=""))["tokens"]
    assert len(bos) == 1
    assert tokens.count(bos[0]) == tokens[:1].count(bos[0]) <= 1
    usage = (await post(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=1))["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    answer = await post(demo_client, RESPONSES, input=ASKS_WEATHER, max_output_tokens=16)
    assert answer["usage"]["input_tokens"] == len(tokens)
    counted = await post(demo_client, f"{MESSAGES}/count_tokens", messages=ASKS_WEATHER)
    assert counted["input_tokens"] == len(tokens)
    # A text has it once too, whoever asks.
    text = (await post(demo_client, "/tokenize", prompt="a"))["tokens"]
    assert text[0] == bos[0] != text[1]


@pytest.mark.parametrize("fields", [{"typical_p": 0.5}, {"top_n_sigma": 1.0}], ids=str)
async def test_typical_p_and_top_n_sigma_change_the_text_and_not_beside_others(
    demo_client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    asked = {"prompt": "Tell", "max_tokens": 16, "temperature": 1.5, "ignore_eos": True, "seed": 42}

    async def text(**more: Any) -> str:
        answer = await post(demo_client, COMPLETIONS, **{**asked, **more})
        written: str = answer["choices"][0]["text"]
        return written

    free, alone = await text(), await text(**fields)
    assert alone != free
    crowd = await asyncio.gather(
        text(**fields),
        *(text(seed=seed, **fields) for seed in range(3)),
        *(text(seed=seed, top_p=0.9) for seed in range(3)),
        text(),
    )
    assert (crowd[0], crowd[-1]) == (alone, free)
    off = {"typical_p": 1, "top_n_sigma": 0}
    assert await text(**off) == free
    assert await text(**dict.fromkeys(off)) == free


async def test_other_protocols_take_them_and_their_bounds(demo_client: httpx.AsyncClient) -> None:
    body = {"input": "Tell me", "max_output_tokens": 16, "typical_p": 0.5, "top_n_sigma": 1.5}
    await post(demo_client, RESPONSES, **body)
    for name, value in (("typical_p", 1.5), ("top_n_sigma", -1), ("typical_p", "x")):
        error = await refused(demo_client, RESPONSES, **{**body, name: value})
        assert error["param"] == name
