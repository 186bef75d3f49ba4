"""What completions and chats have in common: submit, then answer whole or as a stream of events."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import anyio
import msgspec

from src.core.errors import DeadlineExceededError, RequestAbortedError, RequestError
from src.core.outputs import Completion, Delta, FinishReason, GenerationResult, Usage
from src.engine.requests.submission import Submission
from src.http.generation.job import GenerationJob
from src.http.generation.json_chunks import Turn, gathered
from src.http.generation.logprobs import check_number
from src.http.generation.sampling import num_logprobs
from src.http.generation.split_delta import split_delta
from src.http.protocol.generation import StreamOptions
from src.http.protocol.usage import CompletionTokensDetails, PromptTokensDetails, UsageBody
from src.http.server.call import Call
from src.http.server.errors import GenerationFailedError
from src.http.server.line_breaks import unbroken
from src.observability.tracing import RequestTrace

DONE = b"data: [DONE]\n\n"


def counts_always(options: StreamOptions | None) -> bool:
    """Whether every event of a stream has the usage so far: only where the stream has any."""
    return options is not None and bool(options.include_usage and options.continuous_usage_stats)


def shows_steps(options: StreamOptions | None) -> bool:
    """Whether a stream says which of its tokens came together of one step."""
    return options is not None and bool(options.include_steps)


class EventEncoder(Protocol):
    """How an endpoint spells what the engine says bit by bit."""

    def events(self, prompt: int, delta: Delta) -> bytes:
        """Server-sent events for the next delta of a prompt; empty when there is nothing new.

        ``prompt`` is the index of one.

        Raises
        ------
        RequestError
            The answer cannot go on. The delta is untouched.
        """


class AnswerEncoder(EventEncoder, Protocol):
    """How an endpoint spells all that the engine says. ``id`` is what the answer is called."""

    id: str

    def usage_event(self, usage: Usage) -> bytes:
        """The event after the last one, with the usage of the whole request."""

    def body(self, results: Sequence[GenerationResult], usage: Usage) -> Iterator[bytes]:
        """The whole answer, in pieces."""


async def run(call: Call, job: GenerationJob, encoder: AnswerEncoder) -> None:
    """Submit all prompts of a job and answer the call.

    Whoever calls this lets go of the request first: an answer may take long, and there may be many.

    Raises
    ------
    InvalidRequestError
        The answer would hold too many log-probabilities.
    SlipstreamError
        Whatever the engine refuses a prompt for; all others are then aborted.
    """
    describe_trace(call, encoder.id, job.asked_model, stream=job.streams)
    most = call.server.config.http.max_logprobs_per_answer
    check_number(job.num_prompt_logprobs, most, job.scores_prompts)
    of_token = num_logprobs(job.prompts[0][1].logprobs)
    async with submitted(job, call.id, call.trace) as submissions:
        if job.streams:
            await _stream(call, submissions, encoder, with_usage=job.with_usage)
        else:
            made = functools.partial(_num_made, job.num_prompt_logprobs, of_token, submissions)
            results = []
            for submission in submissions:
                # Refused as soon as it is too long, rather than for what it could have become.
                await submission.wait_end((lambda: made() > most) if of_token else lambda: False)
                check_number(made() if of_token else 0, most, "logprobs")
                results.append(await collected(submission))
            await call.answer(*await gathered(encoder.body(results, _total(submissions))))


def _num_made(of_prompts: int, of_token: int, submissions: Sequence[Submission]) -> int:
    """How many log-probabilities an answer would have by now."""
    # Those of prompts whose turn to be collected is yet to come wait in memory too.
    return of_prompts + _total(submissions).completion_tokens * of_token


def describe_trace(call: Call, response_id: str, model: str | None, *, stream: bool) -> None:
    """Say in the call's trace, where there is one, what was asked for."""
    if call.trace is not None:
        call.trace.response_id = response_id
        call.trace.attributes["gen_ai.request.stream"] = stream
        if model is not None:
            call.trace.model = model


def usage_body(usage: Usage, reasoning_tokens: int | None = None) -> UsageBody:
    """Usage as OpenAI spells it.

    It says how many of the tokens were reasoning where there may be, and how many of a prediction
    were right and wrong where there was one.
    """
    body = UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
    )
    if reasoning_tokens is not None or usage.accepted_prediction_tokens is not None:
        body.completion_tokens_details = CompletionTokensDetails(
            _if_there(reasoning_tokens),
            _if_there(usage.accepted_prediction_tokens),
            _if_there(usage.rejected_prediction_tokens),
        )
    return body


def _if_there(number: int | None) -> int | msgspec.UnsetType:
    return msgspec.UNSET if number is None else number


def finish_reason(delta_reason: FinishReason | None) -> str | None:
    """A finish reason as OpenAI spells it; a deadline cuts the output short as a limit does."""
    if delta_reason is None:
        return None
    if delta_reason is FinishReason.DEADLINE:
        return FinishReason.LENGTH.value
    value: str = delta_reason.value
    return value


def stop_reason(reason: FinishReason | None, stopped_by: str | int | None) -> str | int | None:
    """What ended it, in vLLM's field; ``deadline`` tells that from a limit of tokens."""
    return FinishReason.DEADLINE.value if reason is FinishReason.DEADLINE else stopped_by


def is_cut_short(end: Delta | Completion) -> bool:
    """Whether the model would have written more: it was not the one that ended this text."""
    return end.finish_reason is not FinishReason.STOP or isinstance(end.stop_reason, str)


@asynccontextmanager
async def submitted(
    job: GenerationJob, request_id: str, trace: RequestTrace | None
) -> AsyncIterator[list[Submission]]:
    """All prompts of the job, or none; leaving the block aborts what is unfinished."""
    async with AsyncExitStack() as stack:
        submissions = await _submit(stack, job, request_id, trace)
        # What may be large is the engine's now.
        job.prompts, job.prompt_token_ids, job.chat = (), None, None
        job.prediction = None
        if job.admission is not None:
            job.admission.release()
        yield submissions


async def _submit(
    stack: AsyncExitStack,
    job: GenerationJob,
    request_id: str,
    trace: RequestTrace | None,
) -> list[Submission]:
    submissions = []
    for prompt, params in job.prompts:
        submission = job.engine.submit(
            prompt,
            params,
            request_id=request_id,
            priority=job.priority,
            timeout=job.timeout,
            cache_salt=job.cache_salt,
            tenant=job.tenant,
            lora=job.lora,
            prediction=job.prediction,
            chat=job.chat,
            trace=trace,
            admission=job.admission,
        )
        submissions.append(await stack.enter_async_context(submission))
        # Others get the event loop between two prompts, which may be long.
        await anyio.lowlevel.checkpoint()
    return submissions


async def collected(submission: Submission) -> GenerationResult:
    """All that a submission generates.

    Raises
    ------
    SlipstreamError
        It ended with something that is no answer.
    """
    result = await submission.result()
    for completion in result.completions:
        check_end(completion.finish_reason, has_output=bool(completion.token_ids))
    return result


async def _stream(
    call: Call, submissions: Sequence[Submission], encoder: AnswerEncoder, *, with_usage: bool
) -> None:
    if len(submissions) == 1:
        await forward(call, 0, submissions[0], encoder)
    else:
        await _forward_all(call, submissions, encoder)
    last = encoder.usage_event(_total(submissions)) if with_usage else b""
    await call.end(last + DONE)


async def forward(call: Call, prompt: int, submission: Submission, encoder: EventEncoder) -> None:
    """Write a prompt's deltas: one write for all that has come since the last one."""

    def write_at_once(delta: Delta) -> bool:
        direct = call.direct
        if direct is None or not direct.is_ready:
            return False
        try:
            events = encoder.events(prompt, delta)
        # The reader gets the delta, and with it the error: here it would be one of the engine's.
        except RequestError:
            return False
        if events:
            direct.write(unbroken(events))
        return True

    while deltas := await submission.take():
        for delta in deltas:
            check_end(delta.finish_reason, has_output=call.started or bool(delta.token_ids))
        await write_in_turns(
            call, (encoder.events(prompt, part) for delta in deltas for part in split_delta(delta))
        )
        if call.direct is not None and call.direct.is_ready:
            submission.divert(write_at_once)


async def write_in_turns(call: Call, pieces: Iterable[bytes]) -> None:
    """Write pieces of events in one go, unless making them takes so long that others must wait."""
    turn = Turn()
    waiting = []
    for piece in pieces:
        waiting.append(piece)
        if turn.is_over:
            if made := b"".join(waiting):
                await call.write(made)
            waiting.clear()
            await turn.pass_on()
    if made := b"".join(waiting):
        await call.write(made)


async def _forward_all(
    call: Call, submissions: Sequence[Submission], encoder: AnswerEncoder
) -> None:
    failures: list[Exception] = []
    async with anyio.create_task_group() as tasks:

        async def forward_one(prompt: int, submission: Submission) -> None:
            try:
                await forward(call, prompt, submission, encoder)
            # Kept for the caller as it is: a task group would wrap it into a group.
            except Exception as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

        for prompt, submission in enumerate(submissions):
            tasks.start_soon(forward_one, prompt, submission)
    if failures:
        raise failures[0]


def check_end(reason: FinishReason | None, *, has_output: bool) -> None:
    """Raise for an end that is not an answer.

    Raises
    ------
    RequestAbortedError, GenerationFailedError, DeadlineExceededError
        What it was.
    """
    if reason is FinishReason.ABORT:
        raise RequestAbortedError("the request was aborted by the server")
    if reason is FinishReason.ERROR:
        raise GenerationFailedError("the engine failed while it served this request")
    if reason is FinishReason.DEADLINE and not has_output:
        raise DeadlineExceededError("the request's deadline passed before its first token")


def _total(submissions: Sequence[Submission]) -> Usage:
    usages = [submission.usage for submission in submissions]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        _sum_of_some([usage.accepted_prediction_tokens for usage in usages]),
        _sum_of_some([usage.rejected_prediction_tokens for usage in usages]),
    )


def _sum_of_some(numbers: Sequence[int | None]) -> int | None:
    """The sum of those that are there; ``None`` if none is."""
    there = [number for number in numbers if number is not None]
    return sum(there) if there else None
