"""Telemetry of one submitted prompt, from its arrival to the end of its last completion."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from src.core.request import Request
from src.engine.requests.embedding_run import EmbeddingRun
from src.engine.requests.prompts import Prompt, RequestOptions
from src.engine.requests.streams import Choice
from src.observability.tracing import (
    CompletionTrace,
    PromptTrace,
    RequestTrace,
    Telemetry,
    TextsTrace,
)
from src.text.tokenizer import Tokenizer


class Observed:
    """A context around one submission; inactive if telemetry is off.

    An HTTP request has its trace already, in the option ``trace``, and ends it itself. A request of
    an embedding program gets a trace here.
    """

    def __init__(self, telemetry: Telemetry, prompt: Prompt, options: RequestOptions) -> None:
        self._telemetry = telemetry
        self._trace: RequestTrace | None = None
        self._owns = False
        self._choices: Sequence[Choice] = ()
        self.active = telemetry.active
        if not self.active:
            return
        self._arrival = time.monotonic()
        # A chat may arrive as token ids, if its messages were rendered before.
        is_chat = options.get("chat") is not None or _is_messages(prompt)
        self._operation = "chat" if is_chat else "text_completion"
        if "trace" in options:
            self._trace = options["trace"]
        else:
            self._owns = True
            self._trace = telemetry.begin(self._operation, received=self._arrival, server=False)

    def __enter__(self) -> Observed:
        return self

    def queued(
        self,
        request_id: str,
        prompt: Prompt,
        requests: Sequence[Request],
        choices: Sequence[Choice],
        tokenized: float,
        tokenizer: Tokenizer,
    ) -> None:
        """Record the completions just before they are queued; ``tokenized`` is a time."""
        self._choices = choices
        trace = self._trace
        if trace is None:
            return
        first = requests[0]
        if self._owns:
            trace.response_id = request_id
        for choice in choices:
            choice.follow(trace)
        trace.prompts.append(
            PromptTrace(
                arrival=first.arrival,
                tokenized=tokenized,
                num_tokens=len(first.prompt_token_ids),
                max_tokens=first.max_tokens,
                params=first.params,
                given=_shown(prompt, first, tokenizer, trace.content_chars),
                completions=[CompletionTrace(c.record, c.pieces) for c in choices],
            )
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.active:
            return
        # A cancellation means that the client went away; it is not recorded as an error.
        records = [choice.record for choice in self._choices]
        failures = [error if isinstance(error, Exception) else None, *(r.error for r in records)]
        failure = next((each for each in failures if each is not None), None)
        self._telemetry.prompt_ended(self._operation, self._arrival, records, failure)
        trace = self._trace
        if trace is None or not self._owns:
            return
        if failure is not None:
            trace.failed(failure)
        self._telemetry.end(trace)


class ObservedRun:
    """A context around the texts of one call that ask for something else than text.

    They have one span, with their task; inactive if telemetry is off. That of an HTTP request comes
    in the option ``trace``, and is ended where it began.

    Attributes
    ----------
    trace
        The call's trace, if it is sampled.
    """

    def __init__(self, telemetry: Telemetry, run: EmbeddingRun) -> None:
        self.trace: RequestTrace | None = None
        self._telemetry = telemetry
        self._run = run
        self._arrival = time.monotonic()
        # As the conventions call it, where they do.
        self._operation = "embeddings" if run.task == "embed" else run.task
        self._owns = "trace" not in run.options
        if not telemetry.active:
            return
        if self._owns:
            self.trace = telemetry.begin(self._operation, received=self._arrival, server=False)
        else:
            self.trace = run.options["trace"]
        if self.trace is not None:
            self.trace.operation = self._operation
            self.trace.response_id = self.trace.response_id or run.request_id
            self.trace.attributes["slipstream.task"] = run.task

    def __enter__(self) -> ObservedRun:
        return self

    def answered(self, num_texts: int, num_tokens: int, cached_tokens: int) -> None:
        """Note what was computed."""
        if self.trace is not None:
            self.trace.texts = TextsTrace(num_texts, num_tokens, cached_tokens, self._run.first)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._telemetry.active:
            return
        # A cancellation means that the client went away; it is not recorded as an error.
        failure = error if isinstance(error, Exception) else None
        self._telemetry.prompt_ended(self._operation, self._arrival, [], failure)
        if self.trace is not None and self._owns:
            if failure is not None:
                self.trace.failed(failure)
            self._telemetry.end(self.trace)


def _shown(
    prompt: Any, request: Request, tokenizer: Tokenizer, most: int
) -> str | Sequence[Mapping[str, Any]] | None:
    if not most:
        return None
    if isinstance(prompt, str) or _is_messages(prompt):
        return prompt  # type: ignore[no-any-return]
    # A token is at least one character, except for tokens that are parts of a character.
    return tokenizer.decode(request.prompt_token_ids[:most])


def _is_messages(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
