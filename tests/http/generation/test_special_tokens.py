"""Special tokens that are added or shown, on the bundled model, whose tokenizer has one to add."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config, ModelSection
from src.http import create_app
from tests.http.strict import events_of

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).parents[3] / "configs" / "demo"


async def test_special_tokens_are_added_as_asked_for(config: Config) -> None:
    demo = msgspec.structs.replace(
        config, model=ModelSection(path=str(DEMO), served_model_name=("demo",))
    )
    app = create_app(demo, owns_process=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://slipstream", timeout=60
        ) as client,
    ):

        async def prompt_tokens(path: str, **body: object) -> int:
            answer = await client.post(path, json={"model": "demo", "max_tokens": 1, **body})
            assert answer.status_code == 200, answer.text
            tokens: int = answer.json()["usage"]["prompt_tokens"]
            return tokens

        completions = {
            adds: await prompt_tokens("/v1/completions", prompt="Hello", add_special_tokens=adds)
            for adds in (None, True, False)
        }
        messages = [{"role": "user", "content": "Hello"}]
        chats = {
            adds: await prompt_tokens(
                "/v1/chat/completions", messages=messages, add_special_tokens=adds
            )
            for adds in (None, True, False)
        }
    # A text has the model's own tokens unless they are refused; a chat template writes them itself.
    assert completions[None] == completions[True] == completions[False] + 1
    assert chats[None] == chats[False] == chats[True] - 1


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("given", ["Once upon", "One<|end|>two", [0, 300, 2, 301]])
async def test_offsets_of_an_echo_count_what_it_shows(
    demo_app: Starlette, given: str | list[int], adds: bool, skips: bool
) -> None:
    tokenizer = (await demo_app.state.server.ready_engine()).tokenizer
    assert tokenizer.special_ids >= {0, 2}
    ids = tokenizer.encode(given, adds) if isinstance(given, str) else given
    prompt = given if isinstance(given, str) else tokenizer.decode(given, skips)
    # A text is repeated as it was given, without what the tokenizer adds; ids as they are spelt.
    shown = [
        index > 0 or not adds if isinstance(given, str) else not (skips and token_id in (0, 2))
        for index, token_id in enumerate(ids)
    ]
    fields = {
        "prompt": given,
        "add_special_tokens": adds,
        "skip_special_tokens": skips,
        "echo": True,
        "logprobs": 0,
        "max_tokens": 3,
        "temperature": 0,
    }
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(demo_app), base_url="http://slipstream", timeout=60
    ) as client:
        (choice,) = (await client.post("/v1/completions", json=fields)).json()["choices"]
        streamed = await client.post("/v1/completions", json={**fields, "stream": True})
    assert choice["text"].startswith(prompt)
    end, expected = 0, []
    for token_id, is_shown in zip(ids, shown, strict=True):
        expected.append(end)
        end += len(tokenizer.token_bytes(token_id).decode()) if is_shown else 0
    assert end == len(prompt)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[: len(ids) + 1] == [*expected, end]
    *events, _ = events_of(streamed.text)
    pieces = [msgspec.json.decode(data)["choices"][0] for _, data in events]
    assert [i for p in pieces for i in (p["logprobs"] or {}).get("text_offset", ())] == offsets
