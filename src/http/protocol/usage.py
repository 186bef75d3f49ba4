"""Tokens of a request, as every answer reports them."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """How many prompt tokens' KV came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """How many tokens of the completions were reasoning."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """Tokens of a request over all its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
