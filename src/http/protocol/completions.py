"""``/v1/completions``."""

from __future__ import annotations

import msgspec

from src.http.protocol.generation import GenerationRequest
from src.http.protocol.logprobs import CompletionLogprobs, PromptLogprobs
from src.http.protocol.usage import UsageBody


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``."""

    # A text, token ids, or a list of either.
    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class CompletionChoice(msgspec.Struct):
    """One completion, or its next piece in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    step_starts: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionBody(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/completions``."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody
