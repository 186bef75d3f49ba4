"""`add_special_tokens` on the bundled model, whose tokenizer has one to add."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest

from src.core.config import Config, ModelSection
from src.http import create_app

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).parents[2] / "configs" / "demo"


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
