"""Each prompt is tokenized once, whatever an endpoint wants to know of it beforehand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from src.text import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SAID = "a fox and a hen go for a walk"
USER = [{"role": "user", "content": SAID}]
TURNS = [*USER, {"role": "assistant", "content": "Well."}, *USER]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": SAID}),
        ("/v1/completions", {"prompt": SAID, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": SAID, "truncate_prompt_tokens": 5}),
        ("/v1/completions", {"prompt": SAID, "n": 2, "prompt_logprobs": 1}),
        ("/v1/completions/render", {"prompt": SAID}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/chat/completions", {"messages": USER, "return_token_ids": True}),
        ("/v1/chat/completions", {"messages": USER, "prompt_logprobs": 1}),
        ("/v1/chat/completions", {"messages": USER, "truncate_prompt_tokens": 5}),
        ("/v1/chat/completions/render", {"messages": USER, "return_token_ids": True}),
        ("/v1/messages", {"messages": USER}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/v1/responses", {"input": SAID}),
        ("/v1/responses", {"input": TURNS, "truncation": "auto"}),
    ],
)
async def test_a_prompt_is_tokenized_once(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    texts: Counter[str] = Counter()
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *arguments: Any, **options: Any) -> list[int]:
        texts[text] += SAID in text
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    body = fields if "count" in path else {**fields, limit: 3}
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert [count for count in texts.values() if count] == [1]
