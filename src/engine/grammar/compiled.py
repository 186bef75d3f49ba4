"""A compiled grammar, its time budget, and the check of a text against it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from src.engine.grammar.constraints import Constraint
from src.engine.grammar.limits import MATCHER_LEXER_FUEL, MAX_LEXER_STATES, STEP_MAX_ITEMS
from src.engine.grammar.spelling import Spelling

# Seconds: the most that one call may take; what an ordinary call takes; and the most by which all
# calls together may exceed ordinary calls.
_LONGEST_CALL: Final = 0.25
ORDINARY_CALL: Final = 0.003
_EXCESS: Final = 2.0
# Seconds of excess that are forgiven per second that passes.
_FORGIVEN: Final = 0.05

# A judge runs on the event loop, so its calls delay others. Part of an ordinary call's time that
# one of its tokens may take, and the most seconds of one call.
_OF_A_CALL: Final = 1 / 30
_LONGEST_JUDGEMENT: Final = 0.02

# Seconds for which no row looks ahead in a grammar where that has taken too long once.
_SLOW_SECONDS: Final = 60.0

# Tokens after which a matcher that needs no mask computes one, because that refuels the lexer. A
# lexer that runs out of fuel is unusable for all matchers that share it.
REFUELED_TOKENS: Final = 8
# A grammar that compiled within this many seconds may be recompiled on the grammar thread.
_QUICKLY_COMPILED: Final = 0.05

# The library's message for a token that was not in the mask.
_NOT_ALLOWED: Final = "doesn't satisfy the grammar"
_MAX_MESSAGE_CHARS: Final = 300
_QUOTED_LINE: Final = re.compile(r"\n *[0-9]+ \|")


# Where a grammar leaves no choice the library would force tokens. With this option the model
# chooses them, so that a mask depends on the text only, whatever tokens a request forbids.
_OPTIONS: Final = '%llguidance {"no_forcing": true}'


class Candidate(msgspec.Struct, frozen=True):
    """An unchecked grammar text: Lark, or GBNF that has to be converted to Lark."""

    text: str
    is_gbnf: bool = False


class GrammarError(Exception):
    """A grammar cannot be compiled or followed; the message is for the client."""


def parser_limits() -> LLParserLimits:
    """The limits for llguidance's work on one grammar."""
    return LLParserLimits(
        step_lexer_fuel=MATCHER_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def with_options(lark: str) -> str:
    """The grammar with the options that all grammars are compiled with."""
    return f"{lark}\n{_OPTIONS}\n"


def compile_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher at the beginning of the output, with its first mask computed.

    Raises
    ------
    GrammarError
        The grammar is invalid, exceeds its limits, or no text matches it.
    """
    text = with_options(lark)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    raise_fault(matcher)
    matcher.compute_bitmask()
    raise_fault(matcher)
    return matcher


def raise_fault(matcher: LLMatcher) -> None:
    """Raise the error of a matcher, if it is in its error state.

    Raises
    ------
    GrammarError
        The matcher is in its error state.
    """
    if matcher.is_error():
        raise GrammarError(fault_of(matcher))


def fault_of(matcher: LLMatcher) -> str:
    """Why a matcher is in its error state, in one short line."""
    # The message quotes lines of the client's grammar, which are cut off.
    message = _QUOTED_LINE.split(matcher.get_error().partition("<non-verbose/>")[0])[0]
    if message.strip() == "NoExtensionBias":
        return "no text conforms to it, or none that the model's tokens can spell"
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS] or "the grammar cannot be followed"


def is_stuck(matcher: LLMatcher) -> bool:
    """Whether a matcher's error is that no token continues the text, or that a token did not fit.

    A lost lexer gives the same errors. Exceeded limits give others.
    """
    message = matcher.get_error()
    return message.strip().startswith("NoExtensionBias") or _NOT_ALLOWED in message


class TimeBudget:
    """The time that all rows of one grammar together may take to follow it.

    Rows of one grammar wait for each other, so budgets per row would add up. The budget refills
    slowly: a slightly slow grammar may be followed forever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._excess = 0.0
        self._updated = clock()

    def allows(self, seconds: float, num_calls: float = 1) -> bool:
        """Count ``num_calls`` calls of ``seconds`` together; whether they are within the budget."""
        now = self._clock()
        forgiven = (now - self._updated) * _FORGIVEN
        self._updated = now
        excess = max(0.0, seconds - num_calls * ORDINARY_CALL)
        self._excess = max(0.0, self._excess - forgiven) + excess
        return excess == 0.0 or (seconds <= _LONGEST_CALL and self._excess <= _EXCESS)


class CompiledGrammar:
    """A compiled grammar, shared by all requests that ask for it.

    Parameters
    ----------
    matcher
        A matcher at the beginning of the output; it is only copied, never advanced.
    tokenizer
        Of the vocabulary that it was compiled for.
    lanes
        The grammar as constraints, one per lane. Different lanes can be advanced in parallel. May
        be empty.
    recompile
        Makes another matcher like the first, with its own lexer.
    compile_seconds
        Seconds that it took to make the first matcher.
    spelling
        Spells what it forces; ``None``: that is no draft.

    Attributes
    ----------
    budget
        Shared by all rows that follow the grammar.
    is_worn
        Whether a lane's lexer has reached its limit. New rows then begin with a matcher.
    is_spent
        Whether the matchers' shared lexer has reached its limit too. No row can begin then.
    num_renewals
        How often the matchers' lexer was replaced.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        lanes: Sequence[Constraint] = (),
        recompile: Callable[[], LLMatcher] | None = None,
        compile_seconds: float = 0.0,
        spelling: Spelling | None = None,
    ) -> None:
        self._matcher = matcher
        self.spelling = spelling
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._recompile = recompile if compile_seconds <= _QUICKLY_COMPILED else None
        self.budget = TimeBudget()
        self.is_worn = False
        self.is_spent = False
        self.num_renewals = 0
        self._slow_until = float("-inf")

    @property
    def is_slow_ahead(self) -> bool:
        """Whether looking at drafts took too long within the last minute: of any request's rows."""
        return time.monotonic() < self._slow_until

    def took_long_ahead(self) -> None:
        """Looking at drafts took too long."""
        self._slow_until = time.monotonic() + _SLOW_SECONDS

    def begin(self, lane: int) -> Constraint | None:
        """A new constraint of a lane at the beginning of the output; ``None`` if none is usable."""
        if not self._lanes or self.is_worn:
            return None
        return self._lanes[lane % len(self._lanes)].clone()

    def begin_matcher(self) -> LLMatcher:
        """A new matcher at the beginning of the output."""
        return self._matcher.deep_copy()

    def examine(self) -> None:
        """After a matcher has failed: find out whether a new one can begin, and set `is_spent`."""
        probe = self.begin_matcher()
        probe.compute_bitmask()
        self.is_spent = probe.is_error()

    def renew(self) -> bool:
        """If the matchers' lexer is lost, replace it for new matchers; returns whether it did.

        Blocks for a quick compilation. A grammar that compiles slowly is not renewed.
        """
        self.examine()
        if not self.is_spent or self._recompile is None:
            return False
        self._matcher = self._recompile()
        self.is_spent = False
        self.num_renewals += 1
        return True

    def judge(self) -> TextJudge:
        """A judge for the text of one output."""
        return TextJudge(self._matcher.deep_copy(), self._tokenizer.greedy_tokenize, self.budget)


class TextJudge:
    """Tells whether a growing text is complete under a grammar, so that a stop string may end it.

    It follows the text, not the model's tokens, because a stop string may end within a token. If
    the text leaves the grammar, for example by special tokens that the grammar does not know, then
    everything behind counts as complete. If the matcher exceeds its limits or the grammar's budget,
    nothing counts as complete: stop strings are plain text then, because a cut could break the
    requested form.

    Held-back text is consumed once, character by character, however many stop strings end in it.
    Whether it is complete after each character is remembered until the text is let out.
    """

    def __init__(
        self, matcher: LLMatcher, tokenize: Callable[[str], list[int]], budget: TimeBudget
    ) -> None:
        self._matcher = matcher
        self._tokenize = tokenize
        self._budget = budget
        self._is_beyond = False
        self._has_given_up = False
        self._num_tokens = 0
        # Text that the matcher has consumed and that was not let out; the number of tokens of each
        # of its characters; and whether the text is complete after each number of characters.
        self._ahead = ""
        self._ahead_tokens: list[int] = []
        self._ahead_complete: list[bool] = []
        # The character behind that text which the grammar does not allow, if one was tried.
        self._barred: str | None = None

    def advance(self, text: str) -> None:
        """Add text that was let out."""
        # The text may be empty, if all of it is held back.
        if not text or self._is_beyond or self._has_given_up:
            return
        known = self._back_to(text)
        self._ahead, self._barred = self._ahead[known:], None if known < len(text) else self._barred
        del self._ahead_tokens[:known], self._ahead_complete[:known]
        if not (rest := text[known:]):
            return
        self._ahead_complete.clear()
        token_ids = self._tokenize(rest)
        if self._consume(token_ids) < len(token_ids):
            self._is_beyond = True

    def completes(self, text: str) -> bool:
        """Whether the output would be complete if it ended after ``text``."""
        if self._has_given_up or self._is_beyond:
            return not self._has_given_up
        if not self._ahead_complete:
            self._ahead_complete.append(self._matcher.is_accepting())
        if not text.startswith(self._ahead[: len(text)]):
            self._back_to(text)
        for character in text[len(self._ahead) :]:
            if self._barred == character or not self._look_ahead(character):
                return False
        return self._ahead_complete[len(text)] and not self._has_given_up

    def _look_ahead(self, character: str) -> bool:
        """Consume one held-back character; whether the grammar allows it."""
        token_ids = self._tokenize(character)
        taken = self._consume(token_ids)
        if taken < len(token_ids) or not token_ids:
            self._barred = character
            if not self._matcher.rollback(taken):
                self._has_given_up = True
            return False
        self._ahead, self._barred = self._ahead + character, None
        self._ahead_tokens.append(taken)
        self._ahead_complete.append(self._matcher.is_accepting())
        return not self._has_given_up

    def _back_to(self, text: str) -> int:
        """Roll back held-back text to its common prefix with ``text``; returns that length."""
        if text.startswith(self._ahead) or self._ahead.startswith(text):
            return min(len(text), len(self._ahead))
        # commonprefix compares strings here, not paths.
        known = len(commonprefix([text, self._ahead]))  # noqa: RUF071
        if not self._matcher.rollback(sum(self._ahead_tokens[known:])):
            self._has_given_up = True
        self._ahead, self._barred = self._ahead[:known], None
        del self._ahead_tokens[known:], self._ahead_complete[known + 1 :]
        return known

    def _consume(self, token_ids: list[int]) -> int:
        """Consume tokens; returns how many the matcher took."""
        taken = 0
        while taken < len(token_ids) and not self._has_given_up:
            chunk = token_ids[taken : taken + REFUELED_TOKENS - self._num_tokens]
            started = time.thread_time()
            count = self._matcher.try_consume_tokens(chunk)
            self._charge(started, len(chunk) * _OF_A_CALL)
            taken += count
            is_short = count < len(chunk)
            # A lexer without fuel also takes nothing, so a refusal counts only just after a mask.
            if is_short and self._num_tokens == count == 0:
                break
            self._num_tokens += count
            if is_short or self._num_tokens >= REFUELED_TOKENS:
                self._refuel()
        return taken

    def _refuel(self) -> None:
        self._num_tokens = 0
        started = time.thread_time()
        self._matcher.compute_bitmask()
        self._charge(started, 1)

    def _charge(self, started: float, num_calls: float) -> None:
        seconds = time.thread_time() - started
        is_long = seconds > _LONGEST_JUDGEMENT
        if is_long or not self._budget.allows(seconds, num_calls) or self._matcher.is_error():
            self._has_given_up = True
