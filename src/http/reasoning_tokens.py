"""How many tokens of an answer were reasoning."""

from __future__ import annotations

from collections.abc import Iterable

from src.text.answer_plan import AnswerPlan
from src.text.thinking import ThinkingTracker
from src.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Counts them in one answer, by the tags that its tokens spell, which do not count."""

    def __init__(self, plan: AnswerPlan, tokenizer: Tokenizer) -> None:
        thinking = plan.thinking()
        self._tokenizer = tokenizer
        self._tracker: ThinkingTracker | None = None
        if thinking is not None:
            self._tracker = ThinkingTracker(thinking)

    def count(self, token_ids: Iterable[int]) -> None:
        """The answer goes on with these."""
        tracker = self._tracker
        if tracker is None:
            return
        for token_id in token_ids:
            if tracker.is_over:
                break
            tracker.take(self._tokenizer.token_bytes(token_id))

    @property
    def tokens(self) -> int:
        """So far."""
        return 0 if self._tracker is None else self._tracker.num_tokens
