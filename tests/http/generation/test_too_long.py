"""What does not fit the context: each protocol says so in its own words.

The reports are listed by kind in docs/clients.md, "Tried from public reports".
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.http.asking import (
    ASKS_WEATHER,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    post,
    refused,
)
from tests.http.conftest import CONTEXT

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

# What does not fit the context: each protocol's clients look for its own words.


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 1200}]}, "messages"),
        (COMPLETIONS, {"prompt": "word " * 1200}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 1200}, "prompt"),
        (CHAT, {"messages": ASKS_WEATHER, "max_tokens": 9000}, "max_tokens"),
        (CHAT, {"messages": ASKS_WEATHER, "max_completion_tokens": 9000}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 9000}, "max_tokens"),
        (RESPONSES, {"input": "word " * 1200}, "input"),
        (RESPONSES, {"input": "a", "max_output_tokens": 9000}, "max_output_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 15_000}]}, "messages"),
    ],
)
async def test_what_is_too_long_for_the_context_is_said_in_openais_words(
    demo_client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    error = await refused(demo_client, path, **body)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]


async def test_what_is_too_long_for_the_context_is_said_in_anthropics_words(
    demo_client: httpx.AsyncClient,
) -> None:
    long = [{"role": "user", "content": "word " * 1200}]
    error = await refused(demo_client, MESSAGES, messages=long, max_tokens=5)
    assert error["type"] == "invalid_request_error"
    count = await post(demo_client, f"{MESSAGES}/count_tokens", messages=long)
    assert error["message"] == (
        f"prompt is too long: {count['input_tokens']} tokens > {CONTEXT} maximum"
    )
    short = await post(demo_client, f"{MESSAGES}/count_tokens", messages=ASKS_WEATHER)
    error = await refused(demo_client, MESSAGES, messages=ASKS_WEATHER, max_tokens=32_000)
    assert error["message"] == (
        f"input length and `max_tokens` exceed context limit: {short['input_tokens']} + 32000 > "
        f"{CONTEXT}, decrease input length or `max_tokens` and try again"
    )
    longer = [{"role": "user", "content": "word " * 15_000}]
    error = await refused(demo_client, MESSAGES, messages=longer, max_tokens=5)
    assert error["message"].startswith("prompt is too long: ")
