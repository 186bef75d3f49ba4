"""Tokens without generation: /tokenize, /detokenize, /tokenizer_info, renders, and load."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.engine.requests.prompts import ChatOptions
from src.http import create_app

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

MESSAGES = [{"role": "user", "content": "Tell me about 漢字."}]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_text_has_the_tokens_that_a_completion_would_have(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    body = await post(client, "/tokenize", prompt="one two 漢", model="tiny")
    ids = await engine.tokenize("one two 漢")
    assert body["tokens"] == ids
    assert body["count"] == len(ids)
    assert body["max_model_len"] == engine.model_info.max_model_len
    assert body["token_strs"] is None
    without = await engine.tokenize("one two 漢", chat=ChatOptions(add_special_tokens=False))
    assert (await post(client, "/tokenize", prompt="one two 漢", add_special_tokens=False))[
        "tokens"
    ] == without
    assert (await post(client, "/tokenize", prompt="", add_special_tokens=False))["count"] == 0


async def test_tokens_are_spelt_as_in_the_vocabulary(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    body = await post(client, "/tokenize", prompt="one two 漢", return_token_strs=True)
    assert [engine.tokenizer.token_to_id(name) for name in body["token_strs"]] == body["tokens"]


async def test_messages_have_the_tokens_that_a_chat_would_have(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    body = await post(client, "/tokenize", messages=MESSAGES)
    assert body["tokens"] == await engine.tokenize(MESSAGES)
    closed = await post(client, "/tokenize", messages=MESSAGES, add_generation_prompt=False)
    options = ChatOptions(add_generation_prompt=False)
    assert closed["tokens"] == await engine.tokenize(MESSAGES, chat=options)
    assert closed["tokens"] != body["tokens"]


async def test_text_comes_back_whole(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    ids = await engine.tokenize(MESSAGES)
    body = await post(client, "/detokenize", tokens=ids, model="tiny")
    assert body == {"prompt": engine.tokenizer.decode(ids, skip_special_tokens=False)}
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "word " * 15_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "{{ x }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [10**4000]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 1025}, "tokens"),
    ],
)
async def test_bad_requests(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = await client.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.text) < 500


async def test_models_that_are_not_served(client: httpx.AsyncClient) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        answer = await client.post(path, json={**body, "model": "other"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_the_tokenizer_is_described(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    info = (await client.get("/tokenizer_info")).json()
    assert info["vocab_size"] == engine.tokenizer.vocab_size
    assert info["model_max_length"] == engine.model_info.max_model_len
    assert info["special_tokens"] == engine.tokenizer.special_tokens
    assert "messages" in info["chat_template"]


async def test_a_rendered_completion_is_what_would_be_prefilled(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    prompts = ["one two", "three"]
    fields = {"prompt": prompts, "max_tokens": 3, "temperature": 0.5, "cache_salt": "s", "top_k": 4}
    bodies = await post(client, "/v1/completions/render", **fields, request_id="mine")
    assert [body["token_ids"] for body in bodies] == [await engine.tokenize(p) for p in prompts]
    for body in bodies:
        params = body["sampling_params"]
        assert (params["max_tokens"], params["temperature"], params["top_k"]) == (3, 0.5, 4)
        assert (body["request_id"], body["model"], body["cache_salt"]) == ("mine", "tiny", "s")
        assert body["stream"] is False


async def test_a_rendered_chat_is_what_would_be_prefilled(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    body = await post(
        client, "/v1/chat/completions/render", messages=MESSAGES, stream=True, max_tokens=5
    )
    assert body["token_ids"] == await engine.tokenize(MESSAGES)
    assert body["stream"] is True
    served = await post(
        client, "/v1/chat/completions", messages=MESSAGES, max_tokens=1, return_token_ids=True
    )
    assert served["prompt_token_ids"] == body["token_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions/render", {"prompt": "x", "temperature": 9}, "temperature"),
        ("/v1/completions/render", {"prompt": [10**9]}, "prompt"),
        ("/v1/completions/render", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "top_k": -7}, "top_k"),
        (
            "/v1/completions/render",
            {"prompt": "x", "logits_processors": [{"name": "nobody"}]},
            "logits_processors",
        ),
        ("/v1/chat/completions/render", {"messages": []}, "messages"),
        (
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": "word " * 15_000}]},
            "messages",
        ),
    ],
)
async def test_a_bad_request_is_not_rendered(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(path, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_load_counts_what_runs_and_waits(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    assert (await client.get("/get_load")).json() == {"load": 0}
    params = SamplingParams(max_tokens=200, ignore_eos=True, n=2)
    async with engine.submit("one", params) as submission:
        await submission.take()
        assert (await client.get("/get_load")).json() == {"load": 2}
        assert (await client.get("/load")).json() == {"server_load": 2}


async def test_a_server_without_an_engine_has_no_load() -> None:
    app: Starlette = create_app(owns_process=False)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as nobody:
        assert (await nobody.get("/get_load")).status_code == 503
        assert (await nobody.get("/ping")).status_code == 503


async def test_it_never_sleeps_and_answers_pings(client: httpx.AsyncClient) -> None:
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await client.get("/ping")).status_code == 200
    assert (await client.post("/ping")).status_code == 200
