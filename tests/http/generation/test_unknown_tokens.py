"""Tokens that the tokenizer has and the model does not, as of a fine-tune that was not resized."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src import AsyncEngine, SamplingParams
from src.core.config import Config, ModelSection
from src.core.errors import InvalidRequestError
from src.http import create_app
from tests.support.strange_token import STRANGE, with_a_strange_token

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

TEXT = f"hi {STRANGE}"


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL_RESULT = [
    *user("hi"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": TEXT},
]
# Path, the field that is at fault, and the body.
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/completions", "prompt", {"prompt": TEXT, "max_tokens": 4}),
    ("/v1/completions", "prompt", {"prompt": ["hi", TEXT], "max_tokens": 4}),
    ("/v1/completions", "prompt", {"prompt": [5, 2048], "max_tokens": 4}),
    ("/v1/completions", "prompt", {"prompt": "x " * 1500 + TEXT, "max_tokens": 4}),
    ("/v1/completions", "bad_words", {"prompt": "hi", "bad_words": [STRANGE], "max_tokens": 4}),
    ("/v1/completions", "stop_token_ids", {"prompt": "hi", "stop_token_ids": [2048]}),
    ("/v1/completions", "logit_bias", {"prompt": "hi", "logit_bias": {"2048": 1}}),
    ("/v1/completions", "allowed_token_ids", {"prompt": "hi", "allowed_token_ids": [2048]}),
    ("/v1/chat/completions", "messages", {"messages": user(TEXT), "max_tokens": 4}),
    ("/v1/chat/completions", "messages", {"messages": TOOL_RESULT, "max_tokens": 4}),
    ("/v1/responses", "input", {"input": TEXT, "max_output_tokens": 16}),
    ("/v1/responses", "input", {"input": "hi", "instructions": TEXT, "max_output_tokens": 16}),
    ("/v1/messages", "messages", {"messages": user(TEXT), "max_tokens": 4}),
    ("/v1/messages/count_tokens", "messages", {"messages": user(TEXT)}),
    ("/tokenize", "prompt", {"prompt": TEXT}),
    ("/tokenize", "messages", {"messages": user(TEXT)}),
]


@pytest.fixture(scope="module")
async def strange_app(
    config: Config, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[Starlette]:
    path = with_a_strange_token(tmp_path_factory.mktemp("strange") / "demo")
    model = ModelSection(path=str(path), served_model_name=("demo",))
    app = create_app(msgspec.structs.replace(config, model=model), owns_process=False)
    async with app.router.lifespan_context(app):
        await app.state.server._engine.wait_ready()
        yield app


@pytest.fixture
async def engine(strange_app: Starlette) -> AsyncEngine:
    engine: AsyncEngine = await strange_app.state.server.ready_engine()
    return engine


@pytest.mark.parametrize(
    ("path", "field", "body"), REQUESTS, ids=[f"{path}-{field}" for path, field, _ in REQUESTS]
)
async def test_it_is_refused_by_the_name_of_the_field_and_nobody_else_notices(
    strange_app: Starlette, engine: AsyncEngine, path: str, field: str, body: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone = await engine.generate("Once upon a time", params)
    beside = asyncio.create_task(engine.generate("Once upon a time", params))
    transport = httpx.ASGITransport(strange_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        answer = await client.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    # The protocol of messages has no place for the field but its message.
    if path.startswith("/v1/messages"):
        assert "param" not in error
    else:
        assert error["param"] == field
    if path != "/v1/responses":
        assert field in error["message"]
    assert (await beside).token_ids == alone.token_ids
    assert engine.metrics.value("slipstream_step_failures_total") == 0


async def test_the_python_api_refuses_it_too(engine: AsyncEngine) -> None:
    for prompt in (TEXT, user(TEXT)):
        with pytest.raises(InvalidRequestError, match="2048") as refused:
            await engine.generate(prompt, SamplingParams(max_tokens=4))
        assert refused.value.param == "prompt"


async def test_a_text_around_it_and_a_form_that_spells_it_are_served(engine: AsyncEngine) -> None:
    """Its tag is text for a model that does not have the token."""
    assert 2048 not in engine.tokenizer.special_ids
    assert engine.tokenizer.token_to_id(STRANGE) == 2048
    assert (await engine.generate("hi <|new |>", SamplingParams(max_tokens=4))).token_ids
