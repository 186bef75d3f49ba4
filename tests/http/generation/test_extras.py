"""What vLLM adds to OpenAI's requests, and fields that nobody has heard of."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.engine.client import AsyncEngine
from src.http.server.state import Server
from src.observability.metrics import EngineMetrics

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

COMPLETIONS = "/v1/completions"
UNKNOWN = "slipstream_http_unknown_fields_total"


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "one two three", "temperature": 0, "max_tokens": 6, **fields}
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


async def pieces(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": "one two three", "temperature": 0, "max_tokens": 6, "stream": True, **fields}
    answer = await client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(event[6:]) for event in answer.text.split("\n\n")[:-2]]


async def test_token_ids_come_when_asked_for(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    body = await complete(client, return_token_ids=True)
    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == await engine.tokenize("one two three")
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert engine.tokenizer.decode(choice["token_ids"]).strip() == choice["text"].strip()
    plain = (await complete(client))["choices"][0]
    assert "token_ids" not in plain
    assert "prompt_token_ids" not in plain


async def test_a_stream_has_every_token_id_once(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    whole = (await complete(client, return_token_ids=True, n=2))["choices"]
    events = await pieces(client, return_token_ids=True, n=2)
    for index in range(2):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert [i for c in own for i in c["token_ids"]] == whole[index]["token_ids"]
        assert own[0]["prompt_token_ids"] == whole[index]["prompt_token_ids"]
        assert not any("prompt_token_ids" in choice for choice in own[1:])


async def test_a_prompt_is_cut_to_its_last_tokens(
    client: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    ids = await engine.tokenize("one two three")
    cut = await complete(client, truncate_prompt_tokens=2, return_token_ids=True, echo=True)
    (choice,) = cut["choices"]
    assert choice["prompt_token_ids"] == ids[-2:]
    assert choice["text"].startswith(engine.tokenizer.decode(ids[-2:]))
    longer = await complete(client, truncate_prompt_tokens=500, return_token_ids=True)
    assert longer["choices"][0]["prompt_token_ids"] == ids
    lists = await complete(client, prompt=[ids, ids[:1]], truncate_prompt_tokens=1)
    assert lists["usage"]["prompt_tokens"] == 2


async def test_a_prompt_is_cut_to_what_fits(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    context = engine.model_info.max_model_len
    for prompt in ("word " * 4000, [5] * 5000):
        body = await complete(client, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=6)
        assert body["usage"]["prompt_tokens"] == context - 6
        assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("value", [0, -2, 1024, 10**30, "5", True])
async def test_prompts_cannot_be_cut_to_anything(client: httpx.AsyncClient, value: Any) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "x", "truncate_prompt_tokens": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_an_answer_is_called_what_the_client_says(client: httpx.AsyncClient) -> None:
    assert (await complete(client, request_id="run-7"))["id"] == "cmpl-run-7"
    for name in ("", "a b", "x" * 129, "é", "a\nb", "a\n"):
        answer = await client.post(COMPLETIONS, json={"prompt": "x", "request_id": name})
        assert answer.json()["error"]["param"] == "request_id"


async def test_the_fingerprint_is_the_servers(client: httpx.AsyncClient) -> None:
    body = await complete(client)
    assert body["system_fingerprint"].startswith("fp_")
    for event in await pieces(client):
        assert event["system_fingerprint"] == body["system_fingerprint"]


async def test_fields_that_mean_nothing_here_are_accepted(
    client: httpx.AsyncClient, app: Starlette
) -> None:
    metrics: EngineMetrics = app.state.server.metrics
    fields = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
        "safety_identifier": "x", "prompt_cache_key": "k", "verbosity": "low",
    }  # fmt: skip
    await complete(client, **fields)
    for name in fields:
        assert metrics.value(UNKNOWN, field=name) == 0


async def test_unknown_fields_are_ignored_and_counted(
    client: httpx.AsyncClient, app: Starlette
) -> None:
    metrics: EngineMetrics = app.state.server.metrics
    plain = await complete(client)
    before = metrics.value(UNKNOWN, field="no_stop_trim")
    given = {"no_stop_trim": True, "separate_reasoning": {"deep": [1]}, 'no"word\n': 1}
    assert (await complete(client, **given))["choices"] == plain["choices"]
    assert metrics.value(UNKNOWN, field="no_stop_trim") == before + 1
    assert metrics.value(UNKNOWN, field="separate_reasoning") >= 1
    assert metrics.value(UNKNOWN, field="other") >= 1


async def test_names_of_unknown_fields_are_bounded(
    client: httpx.AsyncClient, app: Starlette
) -> None:
    metrics: EngineMetrics = app.state.server.metrics
    await complete(client, **{f"strange_{i}": 1 for i in range(200)})
    lines = metrics.render()[0].decode().splitlines()
    assert len([line for line in lines if line.startswith(UNKNOWN)]) <= 65


async def test_strict_fields_refuses_what_is_unknown(
    client: httpx.AsyncClient, app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Server = app.state.server
    strict = msgspec.structs.replace(server.config.http, strict_fields=True)
    monkeypatch.setattr(server, "config", msgspec.structs.replace(server.config, http=strict))
    answer = await client.post(COMPLETIONS, json={"prompt": "x", "no_stop_trim": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("no_stop_trim", "unknown_parameter")
    await complete(client, user="me", top_k=3)


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 6, **fields}
    answer = await client.post("/v1/chat/completions", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_chat_has_them_too(client: httpx.AsyncClient, engine: AsyncEngine) -> None:
    prompt = await engine.tokenize([{"role": "user", "content": "Hi there"}])
    body = (await chat(client, return_token_ids=True, request_id="mine")).json()
    assert body["id"] == "chatcmpl-mine"
    assert body["system_fingerprint"].startswith("fp_")
    assert body["prompt_token_ids"] == prompt
    ids = body["choices"][0]["token_ids"]
    assert len(ids) == body["usage"]["completion_tokens"]
    streamed = await chat(client, return_token_ids=True, stream=True)
    events = [json.loads(event[6:]) for event in streamed.text.split("\n\n")[:-2]]
    assert events[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in event for event in events[1:])
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == ids
    cut = (await chat(client, return_token_ids=True, truncate_prompt_tokens=3)).json()
    assert cut["prompt_token_ids"] == prompt[-3:]
    assert cut["usage"]["prompt_tokens"] == 3
    plain = (await chat(client)).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
