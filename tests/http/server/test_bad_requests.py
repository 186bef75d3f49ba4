"""Whatever a client sends is answered with 4xx, in OpenAI's shape, naming the field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from src.observability.metrics import EngineMetrics

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "x"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def check_error(answer: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return error


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"nonsense", "invalid_json"),
        (b'{"prompt": NaN}', "invalid_json"),
        (b'\xff\xfe{"prompt": 1}', "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"x": ' + b"[" * 50_000, "invalid_json"),
        (b"[]", None),
        (b'"text"', None),
        (b"null", None),
    ],
)
async def test_bodies_that_are_no_request(
    client: httpx.AsyncClient, body: bytes, code: str | None
) -> None:
    headers = {"content-type": "application/json"}
    for path in (COMPLETIONS, CHAT):
        answer = await client.post(path, content=body, headers=headers)
        error = check_error(answer, 400, None)
        assert error["code"] == code
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 9}, "prompt"),
        ({"prompt": [5] * 1024}, "prompt"),
        ({"prompt": "word " * 4000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2000}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 99, "max_tokens": 5}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"priority": 2**70}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": 5}, "model"),
        # Refused because their meaning cannot be honoured.
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"logits_processors": ["x"]}, "logits_processors[0]"),
        ({"logits_processors": [{"name": "x"}]}, "logits_processors"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"echo": True, "stream": True, "logprobs": 1, "n": 2}, "echo"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_completion_tokens": 2000}, "max_completion_tokens"),
        ({"min_tokens": 2000}, "min_tokens"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        # To Python these are equal to what asks for nothing.
        ({"early_stopping": 0}, "early_stopping"),
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"length_penalty": True}, "length_penalty"),
        # More than the waiting queue ever holds.
        ({"prompt": ["a"] * 8, "n": 9}, "n"),
        ({"n": 65}, "n"),
        # What is walked has a bound.
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ],
)
async def test_bad_completions(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "hello", **fields})
    error = check_error(answer, 400, param)
    assert param.partition("[")[0].partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[1].function_call",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[1].tool_calls[0].function.name",
        ),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, "messages"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        # Refused because their meaning cannot be honoured.
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"best_of": 2}, "best_of"),
        # What is walked has a bound.
        ({"messages": [{"role": "user"}] * 4097}, "messages"),
        ({"messages": [{**USER, "content": [PART] * 1025}]}, "messages[0].content"),
        ({"messages": [{**USER, "content": [{"type": "text"}] * 600}] * 7}, "messages"),
        ({"tools": [TOOL] * 513}, "tools"),
        ({"documents": [{}] * 1025}, "documents"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
async def test_bad_chats(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await client.post(CHAT, json={"messages": [USER], **fields})
    error = check_error(answer, 400, param)
    if error["code"] != "context_length_exceeded":
        assert param.partition("[")[0].partition(".")[0] in error["message"]


async def test_a_bad_request_is_the_same_error_when_it_asks_for_a_stream(
    client: httpx.AsyncClient,
) -> None:
    for fields, param in (({"temperature": 9}, "temperature"), ({"prompt": [5] * 1024}, "prompt")):
        body = {"prompt": "hello", **fields, "stream": True}
        check_error(await client.post(COMPLETIONS, json=body), 400, param)


async def test_a_prompt_that_is_too_long_has_its_own_code(client: httpx.AsyncClient) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": [5] * 1024})
    assert check_error(answer, 400, "prompt")["code"] == "context_length_exceeded"


async def test_a_list_of_ids_that_is_too_long_is_refused_before_it_is_walked(
    client: httpx.AsyncClient,
) -> None:
    # No id of the model, and mixed kinds: whoever walks it says that instead.
    for prompt in ([10**9] * 1024, [[10**9] * 1024], [5] * 1024 + ["x"]):
        answer = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert check_error(answer, 400, "prompt")["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**4000},
        {"temperature": -(10**4000)},
        {"max_tokens": 10**4000},
        {"min_tokens": 10**4000},
        {"seed": 10**4000},
        {"priority": 10**4000},
        {"prompt": [10**4000]},
        {"max_tokens": 1, "max_completion_tokens": 10**4000},
        {"stop_token_ids": [10**4000]},
    ],
)
async def test_long_numbers_are_not_echoed(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "hello", **fields})
    assert answer.status_code == 400
    assert len(answer.text) < 400


@pytest.mark.parametrize("name", ["other", "", "tiny ", "x" * 5000])
async def test_unknown_models_are_not_found(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.post(COMPLETIONS, json={"prompt": "hello", "model": name})
    error = check_error(answer, 404, "model")
    assert error["code"] == "model_not_found"
    assert len(error["message"]) < 400


async def test_every_served_name_answers(client: httpx.AsyncClient) -> None:
    for name in ("tiny", "org/alias", None):
        body = {"prompt": "hello", "model": name, "max_tokens": 1}
        answer = await client.post(COMPLETIONS, json=body)
        assert answer.json()["model"] == (name or "tiny")


async def test_bodies_over_the_limit(client: httpx.AsyncClient) -> None:
    async def chunks() -> Any:
        for _ in range(30):
            yield b" " * 5000

    headers = {"content-type": "application/json"}
    for content in (b" " * 100_001, chunks()):
        answer = await client.post(COMPLETIONS, content=content, headers=headers)
        error = check_error(answer, 413, None)
        assert error["code"] == "request_too_large"
        assert "100000" in error["message"]


async def test_what_is_no_json_by_its_own_account(client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = await client.post(
            COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind}
        )
        assert check_error(answer, 415, None)["code"] == "unsupported_media_type"
    for headers in ({}, {"content-type": "application/json; charset=utf-8"}):
        answer = await client.post(
            COMPLETIONS, content=b'{"prompt": "x", "max_tokens": 1}', headers=headers
        )
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/completion", "/v1/models/", "//live", "/live/"])
async def test_paths_that_do_not_exist(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path, follow_redirects=False)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("not_found", "model_not_found")


async def test_methods_that_do_not_exist(client: httpx.AsyncClient) -> None:
    answer = await client.get(COMPLETIONS)
    assert check_error(answer, 405, None)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert (await client.post("/live")).status_code == 405
    # All of a path's methods, though each has a route of its own.
    answer = await client.put("/v1/responses/resp_x")
    assert answer.headers["allow"] == "DELETE, GET, HEAD"


async def test_refusals_are_counted_by_reason(client: httpx.AsyncClient, app: Starlette) -> None:
    metrics: EngineMetrics = app.state.server.metrics
    name = "slipstream_http_rejections_total"
    before = metrics.value(name, reason="model_not_found")
    await client.post(COMPLETIONS, json={"prompt": "hello", "model": "other"})
    assert metrics.value(name, reason="model_not_found") == before + 1
