"""A queued request: its choices, its stream and its abort."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from src.core.outputs import (
    Completion,
    Delta,
    FinishReason,
    GenerationResult,
    TokenLogprobs,
    Usage,
)
from src.core.request import Request
from src.engine.own_loop import OwnLoop
from src.engine.requests.streams import Choice, RequestStream, Sink
from src.text.detokenizer import AfterPrompt
from src.text.output import OutputText
from src.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from src.engine.loop import EngineLoop


class Submission:
    """An asynchronous iterator over a request's deltas, with a synchronous `abort`.

    ``requests`` are the completions of one prompt, in order of their index.
    """

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        request_id: str,
        requests: list[Request],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = requests[0].prompt_token_ids
        self._loop = loop
        self._own_loop = OwnLoop(asyncio._get_running_loop())
        self._stream = RequestStream(
            request_id,
            len(self.prompt_token_ids),
            len(requests),
            predicts=requests[0].prediction is not None,
        )
        self._choices: list[Choice] = []
        prompt: Sequence[int] | AfterPrompt = self.prompt_token_ids
        for index, request in enumerate(requests):
            text = _text_of(request, tokenizer, prompt)
            # All choices share this, because reading the prompt's end may mean reading all of it.
            prompt = text.after_prompt
            self._choices.append(Choice(request, index, text, self._stream))

    @property
    def choices(self) -> Sequence[Choice]:
        """Its completions."""
        return self._choices

    @property
    def usage(self) -> Usage:
        """Tokens so far, over all completions."""
        return self._stream.usage

    def start(self, ended: FinishReason | None = None, *, succeeds: bool = False) -> None:
        """Queue all completions or none. If they have ``ended`` already, only tell their reader.

        ``succeeds``: they take the place of one that has ended, see `Scheduler.add_all`.

        Raises
        ------
        QueueFullError, InvalidRequestError
            The scheduler refuses them.
        """
        if ended is None:
            self._loop.submit(self._choices, succeeds=succeeds)
        else:
            self._loop.turn_away(self._choices, ended)

    def abort(self) -> None:
        """Abort the unfinished completions. Does nothing after the end."""
        for choice in self._choices:
            if not choice.finished:
                self._loop.abort(choice.request.key)

    def divert(self, sink: Sink) -> None:
        """Give the next deltas to ``sink`` as they are made, see `RequestStream.divert`.

        Does nothing if there are several completions: their deltas are better taken together.
        """
        if len(self._choices) == 1:
            self._stream.divert(sink)

    async def take(self) -> list[Delta]:
        """Wait for deltas and return one per completion that has any; an empty list at the end."""
        self._own_loop.check()
        return await self._stream.take()

    async def wait_end(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end, or until ``enough`` is true; see `RequestStream.wait_end`."""
        self._own_loop.check()
        await self._stream.wait_end(enough)

    async def result(self) -> GenerationResult:
        """Wait for the end and return the whole output. The reader wakes only once.

        Raises
        ------
        SlipstreamError
            The request failed.
        """
        await self.wait_end()
        collector = _ResultCollector(self.request_id, self.prompt_token_ids)
        async for delta in self:
            collector.add(delta)
        return collector.result(self.usage)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while deltas := await self.take():
            for delta in deltas:
                yield delta


class _ResultCollector:
    """Joins the deltas of a request into its result."""

    def __init__(self, request_id: str, prompt_token_ids: list[int]) -> None:
        self._request_id = request_id
        self._prompt_token_ids = prompt_token_ids
        self._deltas: dict[int, list[Delta]] = {}

    def add(self, delta: Delta) -> None:
        """Take the next delta of any completion."""
        self._deltas.setdefault(delta.index, []).append(delta)

    def result(self, usage: Usage) -> GenerationResult:
        """The joined result; every completion must have ended."""
        prompt_logprobs = next(
            (d.prompt_logprobs for d in self._deltas[0] if d.prompt_logprobs is not None), None
        )
        return GenerationResult(
            request_id=self._request_id,
            prompt_token_ids=self._prompt_token_ids,
            completions=[_completion(self._deltas[index]) for index in sorted(self._deltas)],
            usage=usage,
            prompt_logprobs=prompt_logprobs,
        )


def _completion(deltas: list[Delta]) -> Completion:
    last = deltas[-1]
    if last.finish_reason is None:
        raise RuntimeError("a completion was collected before its end")
    logprobs: list[TokenLogprobs] | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Completion(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _text_of(
    request: Request, tokenizer: Tokenizer, prompt: Sequence[int] | AfterPrompt
) -> OutputText:
    params = request.params
    return OutputText(
        tokenizer,
        prompt,
        stop=params.stop,
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        kept_special_ids=params.kept_special_token_ids,
        stands_alone=request.grammar is not None,
        min_tokens=params.min_tokens,
        judge=request.grammar.judge() if params.stop and request.grammar is not None else None,
        thinking=params.thinking,
    )


__all__ = ["Submission"]
