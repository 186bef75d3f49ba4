"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError, RequestError
from src.core.sampling_params import THINKING_BUDGET, SamplingParams, shown
from src.engine.client import AsyncEngine
from src.http.completions.encoder import CompletionEncoder
from src.http.generation.generation import run
from src.http.generation.job import GenerationJob
from src.http.generation.prompts import Echo, Prompt, cut_of, echoes_of, given_prompts, token_ids_of
from src.http.generation.sampling import (
    COMPLETION_MAX_TOKENS,
    FieldNames,
    num_logprobs,
    refuse_unsupported,
    sampling_params,
    unsupported,
)
from src.http.generation.structured import structured_output
from src.http.generation.thinking import thinking_behind, thinking_budget
from src.http.protocol.completions import CompletionRequest
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

_decode: Final = RequestDecoder(CompletionRequest)


async def create_completion(call: Call) -> None:
    """Complete one prompt or several, each ``n`` times."""
    request = _decode(call)
    names = FieldNames.of(request)
    try:
        job = await prepare_completion(call, request)
        echoes = await _echoes(job, request) if request.echo else None
        encoder = CompletionEncoder(
            request,
            job.engine,
            model=job.model,
            prompt_token_ids=job.prompt_token_ids or [],
            echoes=echoes,
            stand_alone=any(p.structured_output is not None for _, p in job.prompts),
        )
        # An answer may take long, and there may be many.
        job.given = []
        del request
        await run(call, job, encoder)
    except RequestError as error:
        names.apply(error)
        raise


class CompletionJob(GenerationJob, kw_only=True):
    """Prompts to complete; ``given`` are they as the client sent them, until they are echoed."""

    given: list[Prompt]


async def prepare_completion(call: Call, request: CompletionRequest) -> CompletionJob:
    """Check a request and turn it into a job.

    Raises
    ------
    SlipstreamError
        The request cannot be served.
    """
    refuse_unsupported(request)
    _check(request)
    config = call.server.config
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    # Now, not after anything is awaited: an adapter that goes meanwhile is missed, not passed over.
    lora = adapter_name(engine, name)
    context = engine.model_info.max_model_len
    most = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    cut = cut_of(request, context, most)
    prompts = given_prompts(request.prompt, config.http.max_prompts_per_request, context, cut)
    _check_number(len(prompts), request.n or 1, config.scheduler.max_waiting_requests)
    token_ids = await token_ids_of(engine, prompts, request.add_special_tokens, cut, call.tenant)
    params = _params(engine, request)
    return CompletionJob.of(
        call,
        request,
        engine,
        name,
        prompts=[(ids, _fitted(engine, request, params, ids)) for ids in token_ids],
        prompt_token_ids=token_ids,
        num_prompt_logprobs=_num_prompt_logprobs(request, token_ids),
        lora=lora,
        given=prompts,
    )


def _check(request: CompletionRequest) -> None:
    if request.echo and request.stream and request.logprobs is not None and (request.n or 1) > 1:
        raise unsupported("echo", " of a stream with logprobs and n > 1")
    newer = request.max_completion_tokens
    if newer is not None:
        if request.max_tokens is not None and request.max_tokens != newer:
            raise InvalidRequestError(
                f"max_completion_tokens is another name for max_tokens, got {shown(newer)} and "
                f"{shown(request.max_tokens)}",
                param="max_completion_tokens",
            )
        request.max_tokens = newer


def _check_number(num_prompts: int, n: int, most: int) -> None:
    """Refuse for good what would be told to come back later for ever."""
    if num_prompts * n > most:
        raise InvalidRequestError(
            f"prompt and n ask for {num_prompts} times {shown(n)} completions, at most {most} fit "
            "the waiting queue",
            param="n" if n > 1 else "prompt",
        )


def _num_prompt_logprobs(request: CompletionRequest, prompts: Iterable[list[int]]) -> int:
    """How many the choices bring of their prompts."""
    shown = num_logprobs(request.prompt_logprobs)
    # Where both are asked for, what is echoed is scored as the prompt is to be.
    echoed = shown or num_logprobs(request.logprobs)
    if not request.echo or request.logprobs is None:
        echoed = 0
    return (request.n or 1) * (shown + echoed) * sum(map(len, prompts))


async def _echoes(job: CompletionJob, request: CompletionRequest) -> list[Echo]:
    """The prompts as choices repeat them; of a text that was cut, its tokens say what is left."""
    token_ids = job.prompt_token_ids or []
    truncates = request.truncate_prompt_tokens is not None
    return await echoes_of(
        job.engine,
        token_ids if truncates else job.given,
        token_ids,
        adds_special_tokens=request.add_special_tokens is not False,
        skips_special_tokens=request.skip_special_tokens is not False,
    )


def _params(engine: AsyncEngine, request: CompletionRequest) -> SamplingParams:
    return sampling_params(
        request,
        engine.model_info.default_sampling,
        # The prompt is scored, and the one token that this makes is left out of the answer.
        max_tokens=1 if request.max_tokens == 0 and request.echo else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        structured_output=structured_output(request, engine.config),
    )


def _fitted(
    engine: AsyncEngine, request: CompletionRequest, params: SamplingParams, prompt: list[int]
) -> SamplingParams:
    """The parameters of one prompt, all of which share what is large."""
    budget = thinking_budget(request)
    if budget is not None:
        if params.structured_output is not None:
            # The form holds from the first character, which is therefore none of any thinking.
            raise unsupported(THINKING_BUDGET, " of a completion whose text must have a form")
        thinking, kept = thinking_behind(engine.tokenizer, engine.config.chat, prompt, budget)
        params = msgspec.structs.replace(params, thinking=thinking, kept_special_token_ids=kept)
    if request.max_tokens is not None:
        return params
    room = engine.model_info.max_model_len - len(prompt)
    wanted = max(COMPLETION_MAX_TOKENS, request.min_tokens or 0)
    return msgspec.structs.replace(params, max_tokens=max(1, min(wanted, room)))
