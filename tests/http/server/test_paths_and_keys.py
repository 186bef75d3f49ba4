"""Paths, methods and keys as clients send them, and what has ended other engines.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from src.core.config import Config, ModelSection, Secret
from src.http import create_app
from tests.http.asking import ASKS_WEATHER, CHAT, COMPLETIONS, post, refused

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

JSON_TYPE = {"content-type": "application/json"}

# Paths, methods, keys


@pytest.mark.parametrize("name", ["org/demo", "org%2Fdemo"])
async def test_a_model_whose_name_has_a_slash_is_found(app: Starlette, name: str) -> None:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client:
        name = name.replace("demo", "alias")
        answer = await client.get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["id"]) == (200, "org/alias")


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/v1/models", "/metrics"])
async def test_head_is_get_without_a_body(demo_client: httpx.AsyncClient, path: str) -> None:
    answer = await demo_client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("tokens", [[-1], [2**31], [2**63], [2**70], [10**6]])
@pytest.mark.parametrize("path", ["/detokenize", COMPLETIONS])
async def test_ids_of_no_token_are_refused(
    demo_client: httpx.AsyncClient, path: str, tokens: list[int]
) -> None:
    param = "tokens" if path == "/detokenize" else "prompt"
    assert (await refused(demo_client, path, **{param: tokens}))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [10**6], "min_tokens": 1}, "stop_token_ids"),
        ({"stop_token_ids": [-5], "min_tokens": 1}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"n": 0, "stream": True}, "n"),
        ({"n": 0}, "n"),
        ({"stream": True, "stream_options": {"include_usage": "True"}}, None),
    ],
)
async def test_what_has_ended_other_engines_is_refused_and_the_next_request_served(
    demo_client: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    error = await refused(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=2, **fields)
    assert error["param"] == (param or "stream_options.include_usage")
    await post(demo_client, CHAT, messages=ASKS_WEATHER, max_tokens=1)


async def test_a_browser_may_ask_first_and_may_read_refusals(config: Config) -> None:
    http = msgspec.structs.replace(
        config.http, api_keys=(Secret("k1"),), cors_origins=("https://app.example",)
    )
    keyed = msgspec.structs.replace(config, http=http, model=ModelSection())
    app = create_app(keyed, owns_process=False)
    origin = {"origin": "https://app.example"}
    names = "authorization,content-type,x-stainless-retry-count,anthropic-version"
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://slipstream") as client,
    ):
        asked = {
            **origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": names,
        }
        answer = await client.options(CHAT, headers=asked)
        assert answer.status_code == 200
        assert set(names.split(",")) <= set(
            answer.headers["access-control-allow-headers"].split(",")
        )
        answer = await client.post(CHAT, json={"messages": ASKS_WEATHER}, headers=origin)
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        # The scheme's name is in no particular case.
        answer = await client.get("/v1/models", headers={"authorization": "bearer k1"})
        assert answer.status_code != 401
