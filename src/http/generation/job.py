"""One request that generates, checked: what the engine is given, and how the answer is to come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from src.core.sampling_params import SamplingParams
from src.engine.client import AsyncEngine
from src.engine.requests.admissions import Admission
from src.engine.requests.predictions import PredictedOutput
from src.engine.requests.prompts import ChatOptions, Prompt
from src.http.protocol.generation import GenerationRequest
from src.http.server.call import Call


class GenerationJob(msgspec.Struct, kw_only=True):
    """What is left of a request, which may be large, while it is answered.

    Attributes
    ----------
    engine, model
        Who serves it, and under which name.
    asked_model
        The name that the client gave, if any.
    prompts
        Each with its parameters. Like ``chat`` and ``prompt_token_ids`` they are there until they
        have been submitted; ``admission`` is released then.
    prompt_token_ids
        Of each prompt, where they were needed beforehand.
    num_prompt_logprobs
        How many log-probabilities of its prompts the answer is to hold.
    scores_prompts
        The field that asks for these.
    streams, with_usage
        Whether the answer is a stream, and whether its last event has the usage.
    prediction
        What the outputs are expected to be; there until it has been submitted.
    timeout
        Seconds until the deadline: the client's, but never later than the configured one.
    """

    engine: AsyncEngine
    model: str
    prompts: Sequence[tuple[Prompt, SamplingParams]]
    prompt_token_ids: list[list[int]] | None = None
    asked_model: str | None = None
    num_prompt_logprobs: int = 0
    scores_prompts: str = "logprobs"
    streams: bool = False
    with_usage: bool = False
    chat: ChatOptions | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    tenant: str = ""
    lora: str | None = None
    prediction: PredictedOutput | None = None
    admission: Admission | None = None

    @classmethod
    def of(
        cls, call: Call, request: GenerationRequest, engine: AsyncEngine, model: str, **more: Any
    ) -> Self:
        """A job with what every request says alike, and ``more`` fields."""
        options = request.stream_options
        return cls(
            engine=engine,
            model=model,
            asked_model=request.model,
            scores_prompts="logprobs" if request.prompt_logprobs is None else "prompt_logprobs",
            streams=bool(request.stream),
            with_usage=options is not None and bool(options.include_usage),
            priority=request.priority or 0,
            timeout=call.timeout(request.timeout, call.server.config.http.request_timeout),
            cache_salt=request.cache_salt or "",
            tenant=call.tenant,
            prediction=(
                None if request.prediction is None else PredictedOutput(request.prediction.text)
            ),
            admission=call.admission,
            **more,
        )
