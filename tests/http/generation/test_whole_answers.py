"""An answer that is not streamed wakes its task once, however many tokens it has."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from src.engine.requests.streams import RequestStream

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

USER = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "fields", "wakes"),
    [
        ("/v1/completions", {"prompt": "hello"}, 1),
        ("/v1/completions", {"prompt": "hello", "n": 3}, 1),
        ("/v1/completions", {"prompt": ["hello", "world"]}, 2),
        ("/v1/completions", {"prompt": "hello", "logprobs": 2}, 1),
        ("/v1/chat/completions", {"messages": USER}, 1),
        ("/v1/messages", {"messages": USER}, 1),
        ("/v1/responses", {"input": "Hi"}, 1),
    ],
)
async def test_a_whole_answer_wakes_its_task_once(
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
    wakes: int,
) -> None:
    woken: list[RequestStream] = []
    tell = RequestStream._tell

    def counted(stream: RequestStream) -> None:
        if stream._news is not None and not stream._news.done():
            woken.append(stream)
        tell(stream)

    monkeypatch.setattr(RequestStream, "_tell", counted)
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    answer = await client.post(path, json={**fields, limit: 60, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    # Of several prompts, those whose turn has not come yet wake nobody.
    assert 1 <= len(woken) <= wakes
