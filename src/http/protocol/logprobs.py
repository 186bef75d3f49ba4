"""Log-probabilities in their shapes."""

from __future__ import annotations

from typing import Any

import msgspec

# vLLM's shape of prompt logprobs: for each prompt token, token id to its figures.
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class CompletionLogprobs(msgspec.Struct):
    """Legacy shape: parallel lists, one entry per token. ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct):
    """One token that could have stood there; ``bytes`` are its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """The token that stands there and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per token."""

    content: list[ChatLogprob]
    refusal: None = None
