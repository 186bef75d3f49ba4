"""Clients of applications in this process, and a question that the demo model answers by a call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
from starlette.applications import Starlette

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
# Where no tools are given the call is text.
ASKS_WEATHER: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "What is the weather in Paris?"}
]
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather.", "parameters": CITY},
}


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a request that is served."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    """The error of a request that is refused."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this process."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://slipstream", timeout=60
    ) as client:
        yield client
