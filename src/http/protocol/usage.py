"""Tokens of a request, as every answer reports them."""

from __future__ import annotations

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """How many prompt tokens' KV came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of the completions: reasoning, and tokens of the request's prediction that were tried.

    A field is there where there may be such tokens.
    """

    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class UsageBody(msgspec.Struct):
    """Tokens of a request over all its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
