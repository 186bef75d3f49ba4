"""The text of one choice: detokenizer and stop strings together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from src.core.thinking import Thinking
from src.text.before_answer import BeforeAnswer
from src.text.detokenizer import AfterPrompt, IncrementalDetokenizer
from src.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from src.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What a push added to the text."""

    text: str
    """Newly certain text that belongs to no stop string."""
    stop: str | None
    """The stop string that ended the text, or None."""
    num_tokens: int
    """How many of the pushed tokens belong to the output: all of them, or those up to and with the
    one that completed the stop string. The caller drops the rest."""


class TextJudge(Protocol):
    """Knows the form that a text must have."""

    def advance(self, text: str) -> None:
        """The text goes on with this."""

    def completes(self, text: str) -> bool:
        """Whether the text would have its form if it went on with this and ended."""


class OutputText:
    """The text of one choice, as it grows.

    A token that ends the output by itself (the end token, a stop token id) has text only if it is
    pushed: leave it out unless its text is wanted.

    Parameters
    ----------
    tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens
        See `src.text.detokenizer.IncrementalDetokenizer`.
    stop
        Stop strings; none of them empty.
    include_stop
        Whether the stop string that ended the text stays in it.
    kept_special_ids, stands_alone
        See there too.
    min_tokens
        A stop string completed by an earlier token than this (counted from 1) is plain text.
    judge
        Where the text must have a form: tells where it has it, so that a stop string is plain text
        everywhere else.
    thinking
        What the text may begin with: stop strings are looked for in what follows it, and until it
        is known whether there is any, the text waits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] | AfterPrompt = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept_special_ids: Collection[int] = (),
        stands_alone: bool = False,
        min_tokens: int = 0,
        judge: TextJudge | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            kept_special_ids=kept_special_ids,
            stands_alone=stands_alone,
        )
        self._judge = judge
        may_end = None if judge is None else judge.completes
        self._stops = StopStrings(stop, include_stop, may_end) if stop else None
        self._before = None if thinking is None else BeforeAnswer(thinking)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens taken into the output so far."""

    @property
    def after_prompt(self) -> AfterPrompt:
        """What was read of the prompt, for other outputs that follow it."""
        return self._detokenizer.after_prompt

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stops.matched if self._stops is not None else None

    def go_on(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens of an output without stop strings; return what they add."""
        assert self._stops is None
        self.num_tokens += len(token_ids)
        return self._detokenizer.push(token_ids)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next tokens. After a stop string none is taken any more."""
        if self._stops is None:
            return TextDelta(self.go_on(token_ids), None, len(token_ids))
        if self._stops.matched is not None:
            return TextDelta("", self._stops.matched, 0)
        shown: list[str] = []
        for used, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            before, text = self._divided(self._detokenizer.push((token_id,)))
            text, stop = self._stops.feed(text, allow_match=self.num_tokens >= self._min_tokens)
            text = before + text
            shown.append(text)
            if self._judge is not None:
                self._judge.advance(text)
            if stop is not None:
                return TextDelta("".join(shown), stop, used)
        return TextDelta("".join(shown), None, len(token_ids))

    def _divided(self, text: str) -> tuple[str, str]:
        """What stop strings are not looked for in, and then what they are."""
        if self._before is None:
            return "", text
        before, text = self._before.feed(text)
        if self._before.is_over:
            self._before = None
        return before, text

    def finish(self) -> str:
        """Return the rest of the text, at the end of an output that no stop string ended.

        The replacement character of an incomplete character may still complete a stop string;
        `stop` says so.
        """
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail
        if self._stops.matched is not None:
            return ""
        before, tail = self._divided(tail)
        if self._before is not None:
            tail += self._before.finish()
        text, stop = self._stops.feed(tail, allow_match=self.num_tokens >= self._min_tokens)
        return before + (text if stop is not None else text + self._stops.finish())
