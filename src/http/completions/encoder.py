"""How completions spell what the engine says."""

from __future__ import annotations

import functools
import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from src.core.outputs import Completion, Delta, GenerationResult, Usage
from src.engine.client import AsyncEngine
from src.http.generation.fingerprint import system_fingerprint
from src.http.generation.generation import (
    counts_always,
    finish_reason,
    shows_steps,
    stop_reason,
    usage_body,
)
from src.http.generation.json_chunks import apart, json_chunks
from src.http.generation.logprobs import (
    LegacyColumns,
    LegacyLogprobs,
    TokenNames,
    join,
    legacy_pieces,
    prompt_pieces,
)
from src.http.generation.prompts import Echo
from src.http.protocol.completions import (
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
)
from src.http.protocol.logprobs import CompletionLogprobs
from src.text.detokenizer import AfterPrompt, IncrementalDetokenizer

_encode = msgspec.json.Encoder().encode


def plain_piece(index: int, text: str) -> bytes:
    """The JSON of a `CompletionChoice` that has text and nothing else."""
    return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}' % (
        index,
        _encode(text),
    )


class CompletionEncoder:
    """Spells one request's answers. ``echoes`` are given where prompts are to be repeated.

    ``stand_alone`` says that outputs do, as `IncrementalDetokenizer` has it.
    """

    def __init__(
        self,
        request: CompletionRequest,
        engine: AsyncEngine,
        *,
        model: str,
        prompt_token_ids: Sequence[list[int]],
        echoes: Sequence[Echo] | None,
        stand_alone: bool = False,
    ) -> None:
        self.id = f"cmpl-{request.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._fingerprint = system_fingerprint(engine.config)
        self._n = request.n or 1
        self._echoes = echoes
        self._prompt_token_ids = prompt_token_ids
        self._only_prompt = request.max_tokens == 0
        self._has_logprobs = request.logprobs is not None
        self._shows_prompt_logprobs = request.prompt_logprobs is not None
        self._tokenizer = engine.tokenizer
        self._stand_alone = stand_alone
        self._goes_on = not (self._only_prompt or stand_alone)
        self._skips_special_tokens = request.skip_special_tokens is not False
        self._names = TokenNames(
            engine.tokenizer, as_ids=bool(request.return_tokens_as_token_ids), prefix="bytes:"
        )
        options = request.stream_options
        self._with_null_usage = options is not None and bool(options.include_usage)
        self._counts_always = counts_always(options)
        self._shows_steps = shows_steps(options) and not self._only_prompt
        head = {"id": self.id, "object": "text_completion", "created": self._created}
        head |= {"model": self._model, "system_fingerprint": self._fingerprint}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._shows_token_ids = bool(request.return_token_ids)
        self._is_plain = not (
            self._has_logprobs
            or self._counts_always
            or self._only_prompt
            or self._shows_token_ids
            or self._shows_steps
            or any(echo.rest for echo in echoes or ())
        )
        self._tail = b'],"usage":null}\n\n' if self._with_null_usage else b"]}\n\n"
        self._streams: dict[int, _Stream] = {}
        self._after_prompts: dict[int, AfterPrompt] = {}

    def usage_event(self, usage: Usage) -> bytes:
        """The event of ``include_usage``."""
        return self._head + b'],"usage":' + _encode(usage_body(self._counted(usage))) + b"}\n\n"

    def body(self, results: Sequence[GenerationResult], usage: Usage) -> Iterator[bytes]:
        """The whole answer, in pieces."""
        body = CompletionBody(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=apart(self._choices(results)),
            usage=usage_body(self._counted(usage)),
        )
        return json_chunks(body)

    def _choices(self, results: Sequence[GenerationResult]) -> Iterator[bytes]:
        before = b"["
        for prompt, result in enumerate(results):
            scored = result.prompt_logprobs or ()
            echoed = []
            if scored and self._has_logprobs and self._echoes is not None:
                echoed = [LegacyColumns()]
                legacy = self._legacy_of_echo(self._echoes[prompt])
                yield from echoed[0].grow(legacy, self._prompt_token_ids[prompt], scored)
            # Made by the first choice that shows it.
            shown = itertools.tee(prompt_pieces(self._names, scored), len(result.completions))
            for completion, of_prompt in zip(result.completions, shown, strict=True):
                yield before
                before = b","
                yield from self._whole_choice(prompt, completion, echoed, of_prompt)
        yield b"]"

    def _whole_choice(
        self,
        prompt: int,
        completion: Completion,
        echoed: list[LegacyColumns],
        prompt_logprobs: Iterable[bytes],
    ) -> Iterator[bytes]:
        choice = self._choice(prompt, completion, first=True)
        choice.text += self._rest(prompt, completion)
        parts = [*echoed]
        if completion.logprobs and not self._only_prompt:
            own = LegacyColumns()
            legacy = self._legacy_of_output(prompt)
            yield from own.grow(legacy, completion.token_ids, completion.logprobs)
            parts.append(own)
        if parts:
            choice.logprobs = apart(legacy_pieces(parts))
        if self._shows_prompt_logprobs:
            choice.prompt_logprobs = apart(prompt_logprobs)
        yield from json_chunks(choice)

    def events(self, prompt: int, delta: Delta) -> bytes:
        """One event, if the delta says anything."""
        index = prompt * self._n + delta.index
        stream = self._streams.get(index)
        first = stream is None
        if stream is None:
            stream = self._streams[index] = self._new_stream(prompt)
        elif self._is_plain and delta.finish_reason is None:
            # Most tokens of most streams.
            return self._head + plain_piece(index, delta.text) + self._tail if delta.text else b""
        choice = self._choice(prompt, delta, first=first)
        if delta.finish_reason is not None and not stream.has_text:
            choice.text += self._rest(prompt, delta)
        stream.has_text = stream.has_text or bool(delta.text)
        choice.logprobs = stream.logprobs(delta)
        if self._shows_steps:
            choice.step_starts = delta.begins_steps
        silent = (
            not (choice.text or choice.token_ids or choice.step_starts)
            and choice.logprobs is None
            and choice.finish_reason is None
        )
        if silent and not first:
            return b""
        return self._head + _encode(choice) + b"]" + self._usage_field(delta.usage) + b"}\n\n"

    def _new_stream(self, prompt: int) -> _Stream:
        if not self._has_logprobs:
            return _Stream()
        echoes = self._echoes
        return _Stream(
            output=None if self._only_prompt else self._legacy_of_output(prompt),
            prompt=None if echoes is None else self._legacy_of_echo(echoes[prompt]),
            prompt_token_ids=self._prompt_token_ids[prompt],
        )

    def _legacy_of_echo(self, echo: Echo) -> LegacyLogprobs:
        text = IncrementalDetokenizer(
            self._tokenizer, skip_special_tokens=echo.skips_special_tokens
        )
        return LegacyLogprobs(self._names, text, num_added=echo.num_added)

    def _legacy_of_output(self, prompt: int) -> LegacyLogprobs:
        begin = len(self._echoed(prompt))
        before = self._after_prompts.get(prompt, self._prompt_token_ids[prompt])
        text = IncrementalDetokenizer(
            self._tokenizer,
            before,
            skip_special_tokens=self._skips_special_tokens,
            stands_alone=self._stand_alone,
        )
        self._after_prompts[prompt] = text.after_prompt
        return LegacyLogprobs(self._names, text, begin)

    def _choice(self, prompt: int, piece: Delta | Completion, *, first: bool) -> CompletionChoice:
        """A piece of one choice; the ``first`` one brings the prompt, where that is echoed."""
        text = "" if self._only_prompt else piece.text
        if first:
            text = self._echoed(prompt) + text
        choice = CompletionChoice(
            prompt * self._n + piece.index,
            text,
            None,
            finish_reason(piece.finish_reason),
            stop_reason(piece.finish_reason, piece.stop_reason),
        )
        if self._shows_token_ids:
            choice.token_ids = [] if self._only_prompt else piece.token_ids
            if first:
                choice.prompt_token_ids = self._prompt_token_ids[prompt]
        return choice

    def _echoed(self, prompt: int) -> str:
        """Return the text before the output. An output that continues the prompt has its rest."""
        if self._echoes is None:
            return ""
        echo = self._echoes[prompt]
        return echo.text if self._goes_on else echo.text + echo.rest

    def _rest(self, prompt: int, ended: Delta | Completion) -> str:
        """Return the rest of the prompt for an output that continues it and has no text.

        An output that a stop string ended did have text, which was cut off.
        """
        if self._echoes is None or ended.text or isinstance(ended.stop_reason, str):
            return ""
        return self._echoes[prompt].rest if self._goes_on else ""

    def _counted(self, usage: Usage) -> Usage:
        if self._only_prompt:
            return msgspec.structs.replace(usage, completion_tokens=0)
        return usage

    def _usage_field(self, usage: Usage) -> bytes:
        if self._counts_always:
            return b',"usage":' + _encode(usage_body(self._counted(usage)))
        return b',"usage":null' if self._with_null_usage else b""


class _Stream:
    """The log-probabilities of one choice of a stream: those of ``prompt`` where it is echoed."""

    def __init__(
        self,
        output: LegacyLogprobs | None = None,
        prompt: LegacyLogprobs | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._output = output
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self.has_text = False
        # Tokens of the prompt whose turn has been.
        self._num_echoed = 0

    def logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        """Those that a delta brings."""
        parts = []
        if delta.prompt_logprobs and self._prompt is not None:
            begin = self._num_echoed
            self._num_echoed += len(delta.prompt_logprobs)
            token_ids = self._prompt_token_ids[begin : self._num_echoed]
            parts.append(self._prompt.entries(token_ids, delta.prompt_logprobs))
        if delta.logprobs and self._output is not None:
            parts.append(self._output.entries(delta.token_ids, delta.logprobs))
        return functools.reduce(join, parts) if parts else None
