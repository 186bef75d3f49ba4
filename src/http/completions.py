"""``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

import anyio
import msgspec

from src.core.errors import InvalidRequestError, RequestError
from src.core.outputs import Completion, Delta, GenerationResult, TokenLogprobs, Usage
from src.core.sampling_params import SamplingParams, shown
from src.engine.client import AsyncEngine
from src.http.call import Call
from src.http.fields import RequestDecoder
from src.http.fingerprint import system_fingerprint
from src.http.generation import Job, finish_reason, job_timeout, run, stop_reason, usage_body
from src.http.logprobs import LegacyLogprobs, TokenNames, join, prompt_logprobs
from src.http.prompts import Prompt, given_prompts, token_ids_of, tokens_to_keep
from src.http.protocol.completions import (
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
)
from src.http.sampling import (
    COMPLETION_MAX_TOKENS,
    refuse_unsupported,
    respell_fields,
    sampling_params,
    unsupported,
)
from src.http.server import served_name
from src.http.structured import structured_output
from src.text.detokenizer import IncrementalDetokenizer

_decode: Final = RequestDecoder(CompletionRequest)
_encode = msgspec.json.Encoder().encode


async def create_completion(call: Call) -> None:
    """Complete one prompt or several, each ``n`` times."""
    request = _decode(call)
    try:
        completion = await prepare_completion(call, request)
        texts = await _texts(completion, request) if request.echo else None
        shape = CompletionShape(request, completion, texts)
        await run(call, completion.engine, request, completion.job, shape)
    except RequestError as error:
        respell_fields(error, request)
        raise


class PreparedCompletion(NamedTuple):
    """Prompts that may be submitted: who serves them, under which name, and as what."""

    engine: AsyncEngine
    model: str
    job: Job
    prompts: list[Prompt]
    prompt_token_ids: list[list[int]]


async def prepare_completion(call: Call, request: CompletionRequest) -> PreparedCompletion:
    """Check a request and turn it into a job.

    Raises
    ------
    SlipstreamError
        The request cannot be served.
    """
    refuse_unsupported(request)
    _check(request)
    config = call.server.config
    engine = await call.server.ready_engine()
    name = served_name(engine.model_info, request.model)
    context = engine.model_info.max_model_len
    most = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    keep = tokens_to_keep(request.truncate_prompt_tokens, context, most)
    prompts = given_prompts(request.prompt, config.http.max_prompts_per_request, context, keep)
    _check_number(len(prompts), request.n or 1, config.scheduler.max_waiting_requests)
    token_ids = await token_ids_of(engine, prompts, request.add_special_tokens, keep)
    params = _params(engine, request)
    job = Job(
        prompts=[(ids, _fitted(engine, request, params, len(ids))) for ids in token_ids],
        priority=request.priority or 0,
        timeout=job_timeout(request, call),
        cache_salt=request.cache_salt or "",
    )
    return PreparedCompletion(engine, name, job, prompts, token_ids)


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


async def _texts(completion: PreparedCompletion, request: CompletionRequest) -> list[str]:
    """The prompts as an echo shows them."""
    truncates = request.truncate_prompt_tokens is not None
    decode = completion.engine.tokenizer.decode
    return [
        prompt
        if isinstance(prompt, str) and not truncates
        else await anyio.to_thread.run_sync(decode, token_ids)
        for prompt, token_ids in zip(completion.prompts, completion.prompt_token_ids, strict=True)
    ]


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
    engine: AsyncEngine, request: CompletionRequest, params: SamplingParams, prompt_len: int
) -> SamplingParams:
    """The parameters of one prompt, all of which share what is large."""
    if request.max_tokens is not None:
        return params
    room = engine.model_info.max_model_len - prompt_len
    wanted = max(COMPLETION_MAX_TOKENS, request.min_tokens or 0)
    return msgspec.structs.replace(params, max_tokens=max(1, min(wanted, room)))


def plain_piece(index: int, text: str) -> bytes:
    """The JSON of a :class:`CompletionChoice` that has text and nothing else."""
    return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}' % (
        index,
        _encode(text),
    )


class CompletionShape:
    """Spells one request's answers. ``prompt_texts`` are given when they are to be echoed."""

    def __init__(
        self,
        request: CompletionRequest,
        completion: PreparedCompletion,
        prompt_texts: Sequence[str] | None,
    ) -> None:
        self.id = f"cmpl-{request.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        engine, self._model = completion.engine, completion.model
        self._fingerprint = system_fingerprint(engine.config)
        self._n = request.n or 1
        self._prompt_texts = prompt_texts
        self._prompt_token_ids = completion.prompt_token_ids
        self._only_prompt = request.max_tokens == 0
        self._shows_prompt_logprobs = request.prompt_logprobs is not None
        self._tokenizer = engine.tokenizer
        self._skips_special_tokens = request.skip_special_tokens is not False
        self._names = TokenNames(
            engine.tokenizer, as_ids=bool(request.return_tokens_as_token_ids), prefix="bytes:"
        )
        options = request.stream_options
        self._counts_always = options is not None and bool(options.continuous_usage_stats)
        self._with_null_usage = options is not None and bool(options.include_usage)
        head = {"id": self.id, "object": "text_completion", "created": self._created}
        head |= {"model": self._model, "system_fingerprint": self._fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._shows_token_ids = bool(request.return_token_ids)
        self._is_plain = not (self._counts_always or self._only_prompt or self._shows_token_ids)
        self._tail = b'],"usage":null}\n\n' if self._with_null_usage else b"]}\n\n"
        self._legacy: dict[int, LegacyLogprobs] = {}

    def usage_event(self, usage: Usage) -> bytes:
        """The event of ``include_usage``."""
        return self._head + b'],"usage":' + _encode(usage_body(self._counted(usage))) + b"}\n\n"

    def body(self, results: Sequence[GenerationResult], usage: Usage) -> bytes:
        """The whole answer."""
        choices = [
            self._choice(
                prompt, completion, self._new_legacy(prompt), result.prompt_logprobs, first=True
            )
            for prompt, result in enumerate(results)
            for completion in result.completions
        ]
        if self._shows_prompt_logprobs:
            for choice in choices:
                scored = results[choice.index // self._n].prompt_logprobs
                choice.prompt_logprobs = prompt_logprobs(self._names, scored or ())
        return _encode(
            CompletionBody(
                id=self.id,
                created=self._created,
                model=self._model,
                system_fingerprint=self._fingerprint,
                choices=choices,
                usage=usage_body(self._counted(usage)),
            )
        )

    def events(self, prompt: int, delta: Delta) -> bytes:
        """One event, if the delta says anything."""
        index = prompt * self._n + delta.index
        legacy = self._legacy.get(index)
        first = legacy is None
        if legacy is None:
            legacy = self._legacy[index] = self._new_legacy(prompt)
        elif self._is_plain and delta.logprobs is None and delta.finish_reason is None:
            # Most tokens of most streams.
            return self._head + plain_piece(index, delta.text) + self._tail if delta.text else b""
        choice = self._choice(prompt, delta, legacy, delta.prompt_logprobs, first=first)
        silent = (
            not (choice.text or choice.token_ids)
            and choice.logprobs is None
            and choice.finish_reason is None
        )
        if silent and not first:
            return b""
        return self._head + _encode(choice) + b"]" + self._usage_field(delta.usage) + b"}\n\n"

    def _new_legacy(self, prompt: int) -> LegacyLogprobs:
        # An echoed prompt is the beginning of the text, otherwise it is what the text follows.
        echoes = self._prompt_texts is not None
        before = () if echoes else self._prompt_token_ids[prompt]
        return LegacyLogprobs(
            self._names,
            IncrementalDetokenizer(
                self._tokenizer, before, skip_special_tokens=self._skips_special_tokens
            ),
        )

    def _choice(
        self,
        prompt: int,
        piece: Delta | Completion,
        legacy: LegacyLogprobs,
        scored: Sequence[TokenLogprobs | None] | None,
        *,
        first: bool,
    ) -> CompletionChoice:
        """A piece of one choice; the ``first`` one brings the prompt, where that is echoed."""
        text, logprobs = "", None
        if first and self._prompt_texts is not None:
            text = self._prompt_texts[prompt]
            if scored is not None and piece.logprobs is not None:
                logprobs = legacy.entries(self._prompt_token_ids[prompt], scored)
            legacy.at(len(text))
        if not self._only_prompt:
            text += piece.text
            if piece.logprobs:
                entries = legacy.entries(piece.token_ids, piece.logprobs)
                logprobs = entries if logprobs is None else join(logprobs, entries)
        choice = CompletionChoice(
            prompt * self._n + piece.index,
            text,
            logprobs,
            finish_reason(piece.finish_reason),
            stop_reason(piece.finish_reason, piece.stop_reason),
        )
        if self._shows_token_ids:
            choice.token_ids = [] if self._only_prompt else piece.token_ids
            if first:
                choice.prompt_token_ids = self._prompt_token_ids[prompt]
        return choice

    def _counted(self, usage: Usage) -> Usage:
        if self._only_prompt:
            return Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return usage

    def _usage_field(self, usage: Usage) -> bytes:
        if self._counts_always:
            return b',"usage":' + _encode(usage_body(self._counted(usage)))
        return b',"usage":null' if self._with_null_usage else b""
