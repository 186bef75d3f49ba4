"""Data of a traced request: collected while it runs, turned into spans afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from src.core.records import RequestRecord
from src.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span


@dataclass(frozen=True)
class CompletionTrace:
    """One completion: its record, and the pieces of its text if content is recorded."""

    record: RequestRecord
    text: Sequence[str] | None


@dataclass(frozen=True)
class PromptTrace:
    """One prompt of a request and its completions.

    Tokenization lies between ``arrival`` and ``tokenized``. ``given`` is the prompt as text or as
    messages, if content is recorded.
    """

    arrival: float
    tokenized: float
    num_tokens: int
    max_tokens: int
    params: SamplingParams
    given: str | Sequence[Mapping[str, Any]] | None
    completions: Sequence[CompletionTrace]


@dataclass(frozen=True)
class TextsTrace:
    """The texts of a request that asks for something else than text, once they are answered.

    ``first`` is the record of the one that was queued first.
    """

    num_texts: int
    num_tokens: int
    cached_tokens: int
    first: RequestRecord | None


@dataclass(eq=False)
class RequestTrace:
    """One sampled request.

    Times are seconds of ``time.monotonic``. Adding ``epoch_offset`` to one, in nanoseconds, gives
    the time since the epoch.

    Attributes
    ----------
    span, context
        The request's own span, and the context for its children.
    trace_id, span_id
        Lower-case hexadecimal digits, 32 and 16.
    operation
        ``chat``, ``text_completion`` or ``embeddings``, or another task.
    received
        When the request's span begins.
    content_chars
        Number of characters of each prompt and output that spans record; 0 for none.
    token_times
        Whether to record the time of every delivery of tokens.
    model, response_id, attributes
        Reported when the span ends.
    texts
        What was computed, where it asks for something else than text.
    error
        The error that ended it, and the error's class, by which dashboards group.
    """

    span: Span
    context: Context
    trace_id: str
    span_id: str
    operation: str
    model: str
    received: float
    epoch_offset: int
    content_chars: int = 0
    token_times: bool = False
    response_id: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    prompts: list[PromptTrace] = field(default_factory=list)
    texts: TextsTrace | None = None
    error: BaseException | None = None
    disconnected: bool = False
    ended: float = 0.0

    @cached_property
    def link(self) -> Link:
        """A link to the request's own span; shared by all steps that serve it."""
        from opentelemetry.trace import Link

        return Link(self.span.get_span_context())

    def nanoseconds(self, moment: float) -> int:
        """A moment as nanoseconds since the epoch."""
        return int(moment * 1e9) + self.epoch_offset

    def failed(self, error: BaseException) -> None:
        """Record why it failed; only the first error counts."""
        if self.error is None:
            self.error = error
