"""What the README shows is what comes, and what the page of clients shows."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from src.core.settings import CHECKOUT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
CLIENTS = (CHECKOUT / "docs" / "clients.md").read_text(encoding="utf-8")
CHAT = "/v1/chat/completions"


def block(kind: str, after: str, page: str = README) -> str:
    """The first fenced block of a kind behind a piece of text."""
    found = re.search(rf"```{kind}\n(.*?)```", page[page.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


def client_of(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)


def without_names(value: Any) -> Any:
    """What is another at each request is left out, but not that it is there."""
    return {**value, "id": "", "created": 0}


async def test_the_curl_line_gets_the_answer_below_it(demo_app: Starlette) -> None:
    command = block("sh", "No network is needed")
    body = json.loads(command[command.index("-d '") + 4 : command.rindex("'")])
    assert CHAT in command
    shown = json.loads(block("json", "curl http"))
    async with client_of(demo_app) as client:
        answer = await client.post(CHAT, json=body)
    given = answer.json()
    # It names the build and the settings of the one who ran it.
    for one in (shown, given):
        assert re.fullmatch(r"fp_[0-9a-f]+", one.pop("system_fingerprint"))
    assert without_names(given) == without_names(shown)
    assert list(given) == list(shown)


async def test_the_curl_line_for_a_vector_gets_one(demo_app: Starlette) -> None:
    command = block("sh", "A vector of a text")
    path = re.search(r"http://127\.0\.0\.1:8000(\S+)", command)
    assert path is not None
    body = json.loads(command[command.index("-d '") + 4 : command.rindex("'")])
    async with client_of(demo_app) as client:
        answer = await client.post(path[1], json=body)
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["data"]
    assert len(item["embedding"]) > 100


async def test_the_snippet_prints_the_text_below_it(demo_app: Starlette) -> None:
    snippet = block("python", "With the `openai` package", CLIENTS)
    prompt = re.search(r'"content": "([^"]+)"', snippet)
    assert prompt is not None
    body = {"messages": [{"role": "user", "content": prompt[1]}], "temperature": 0}
    async with client_of(demo_app) as client:
        answer = await client.post(CHAT, json={"model": "demo", **body})
    assert (
        answer.json()["choices"][0]["message"]["content"] == block("text", snippet, CLIENTS).strip()
    )
