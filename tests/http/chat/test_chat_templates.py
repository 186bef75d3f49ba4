"""Templates, reasoning and tags end to end, on the bundled model with tags that are special tokens.

The model writes no reasoning by itself: a grammar has it write some.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from src.core.config import ChatSection, Config, ModelSection
from src.http import create_app
from tests.http.asking import client_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

DEMO = Path(__file__).parents[3] / "configs" / "demo"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json")
HELLO = [{"role": "user", "content": "What is 5 + 29?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# What the template is given, as the answer's prompt ends with it.
SHOWS = "{{ messages | tojson }}{{ documents | tojson }}{{ reasoning_effort }}{{ extra }}"
# The bundled one's, reduced to a turn; auto detection finds the syntaxes by the comment.
TURN = (
    "{# </think> <tool_call> #}"
    "{{ bos_token }}<|user|>{{ messages[-1].content }}<|end|><|assistant|>"
)
# All of them.
TURNS = (
    "{# </think> <tool_call> #}{{ bos_token }}{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}{{ '' if loop.last else '<|end|>' }}{% endfor %}"
)


@pytest.fixture(scope="module")
async def client(
    config: Config, anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    checkpoint = tmp_path_factory.mktemp("special")
    for name in FILES:
        shutil.copy(DEMO / name, checkpoint)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = True
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    demo = msgspec.structs.replace(
        config,
        model=ModelSection(path=str(checkpoint), served_model_name=("demo",)),
        chat=ChatSection(request_templates="all"),
    )
    app = create_app(demo, owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server.ready_engine()
        async with client_of(app) as client:
            yield client


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 60, **fields}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def ask_streamed(client: httpx.AsyncClient, **fields: Any) -> dict[str, str]:
    """What the deltas' texts join to, by their names."""
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 60, **fields, "stream": True}
    answer = await client.post("/v1/chat/completions", json=body)
    joined: dict[str, str] = {}
    for event in answer.text.split("\n\n")[:-2]:
        delta = json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
        for name, text in delta.items():
            if isinstance(text, str) and name != "role":
                joined[name] = joined.get(name, "") + text
    return joined


async def prompt_of(client: httpx.AsyncClient, **fields: Any) -> str:
    """The prompt that a chat would be served as."""
    body = {"messages": HELLO, "chat_template": SHOWS, **fields}
    rendered = await client.post("/v1/chat/completions/render", json=body)
    assert rendered.status_code == 200, rendered.text
    text = await client.post("/detokenize", json={"tokens": rendered.json()["token_ids"]})
    prompt: str = text.json()["prompt"]
    return prompt


async def test_a_special_tag_is_seen_though_special_tokens_are_skipped(
    client: httpx.AsyncClient,
) -> None:
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = await ask(client, messages=messages, tools=[WEATHER])
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert choice["finish_reason"] == "tool_calls"
    # It is no text of an answer that is not read for calls.
    text = await ask(client, messages=messages, tools=[WEATHER], tool_choice="none")
    assert "tool_call>" not in text["message"]["content"]
    forced = await ask(client, tools=[WEATHER], tool_choice="required", max_tokens=200)
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_reasoning_stands_beside_the_answer(client: httpx.AsyncClient) -> None:
    grammar = 'start: "<think>\\nA sum.\\n</think>\\n\\nIt is " /[0-9]+/'
    fields = {"chat_template": TURN, "structured_outputs": {"grammar": grammar}}
    choice = await ask(client, **fields)
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "A sum."
    assert message["content"].startswith("It is ")
    assert await ask_streamed(client, **fields) == {
        "content": message["content"],
        "reasoning": "A sum.",
        "reasoning_content": "A sum.",
    }


async def test_reasoning_that_the_template_opens(client: httpx.AsyncClient) -> None:
    some = {"max_tokens": 8, "min_tokens": 8}
    choice = await ask(client, chat_template=TURN + "<think>\n", **some)
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"]
    closed = await ask(client, chat_template=TURN + "<think>\n\n</think>\n\n", **some)
    assert "reasoning" not in closed["message"]
    assert closed["message"]["content"]


@pytest.mark.parametrize("parts", [False, True])
async def test_reasoning_of_a_continued_message_is_told_by_that_message(
    client: httpx.AsyncClient, parts: bool
) -> None:
    """What a user writes of tags opens no reasoning."""

    async def continued(user: str, text: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text}] if parts else text
        messages = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": content},
        ]
        how: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
        how |= {"chat_template": TURNS, "max_tokens": 8, "min_tokens": 8}
        choice = await ask(client, messages=messages, **how)
        message: dict[str, Any] = choice["message"]
        return message

    plain = await continued("What does <think> mean?", "The tag")
    assert plain["content"]
    assert "reasoning" not in plain
    thinking = await continued("What does </think> mean?", "<think>\nThe tag")
    assert thinking["content"] is None
    assert thinking["reasoning"]


async def test_a_form_of_the_answer_leaves_the_reasoning_free(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    plain = await ask(client, chat_template=TURN, response_format=form)
    assert set(json.loads(plain["message"]["content"])) >= {"n"}
    # Of reasoning that goes on for ever, the form never begins.
    thinking = await ask(
        client, chat_template=TURN + "<think>", response_format=form, max_tokens=12
    )
    assert thinking["message"]["content"] is None
    assert thinking["finish_reason"] == "length"


async def test_what_a_template_is_given(client: httpx.AsyncClient) -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "one"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    prompt = await prompt_of(
        client,
        messages=messages,
        documents=[{"title": "t"}],
        reasoning_effort="low",
        chat_template_kwargs={"extra": "more"},
    )
    shown, end = json.JSONDecoder().raw_decode(prompt)
    assert prompt[end:] == '[{"title": "t"}]lowmore'
    assert [message["role"] for message in shown] == ["system", "user", "assistant", "tool"]
    assert shown[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert shown[2]["reasoning_content"] == "hm"
    assert shown[3]["tool_call_id"] == "c1"


async def test_no_calls_are_no_list_of_calls(client: httpx.AsyncClient) -> None:
    said = {"role": "assistant", "content": "Hi", "tool_calls": []}
    (shown,), _ = json.JSONDecoder().raw_decode(await prompt_of(client, messages=[said]))
    assert shown == {"role": "assistant", "content": "Hi"}


async def test_an_answer_may_begin_with_the_message_that_it_continues(
    client: httpx.AsyncClient,
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "5 + 29 ="}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    alone = await ask(client, **fields)
    echoed = await ask(client, **fields, echo=True)
    assert echoed["message"]["content"] == "5 + 29 =" + alone["message"]["content"]
    assert echoed["message"]["content"] == "5 + 29 = 34."
    streamed = await ask_streamed(client, **fields, echo=True)
    assert streamed == {"content": echoed["message"]["content"]}
    # There is nothing of the assistant's to begin with.
    assert (await ask(client, echo=True))["message"]["content"] == "5 + 29 = 34."


async def test_a_template_of_the_requests_that_cannot_be_rendered_is_its_own_fault(
    client: httpx.AsyncClient,
) -> None:
    for source in ("{% if", "{{ raise_exception('no') }}", "{{ [0] * 10**9 }}"):
        body = {"messages": HELLO, "max_tokens": 1, "chat_template": source}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400, answer.text
