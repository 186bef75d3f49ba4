"""How many tokens of an answer were reasoning."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from src.text.answer_plan import AnswerPlan
from src.text.thinking import ThinkingTracker
from src.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Counts them in one answer, by the tags that its tokens spell, which do not count."""

    def __init__(self, plan: AnswerPlan, tokenizer: Tokenizer) -> None:
        thinking = plan.thinking()
        self._tokenizer = tokenizer
        self._tracker: ThinkingTracker | None = None
        # Up to a call in reasoning that is never closed.
        self._to_call: ThinkingTracker | None = None
        self.has_calls = False
        """Whether the answer has calls."""
        if thinking is not None:
            self._tracker = ThinkingTracker(thinking)
            if plan.calls_in_reasoning and plan.calls is not None and plan.calls.openings:
                ends = (*thinking.ends_before, *plan.calls.openings)
                called = msgspec.structs.replace(thinking, ends_before=ends)
                self._to_call = ThinkingTracker(called)

    def count(self, token_ids: Iterable[int]) -> None:
        """The answer goes on with these."""
        tracker = self._tracker
        if tracker is None:
            return
        for token_id in token_ids:
            if tracker.is_over:
                break
            piece = self._tokenizer.token_bytes(token_id)
            tracker.take(piece)
            if self._to_call is not None:
                self._to_call.take(piece)

    @property
    def tokens(self) -> int:
        """So far."""
        if self._tracker is None:
            return 0
        if self._to_call is not None and self.has_calls and not self._tracker.is_over:
            return self._to_call.num_tokens
        return self._tracker.num_tokens
