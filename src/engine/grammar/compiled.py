"""A grammar that is ready to be followed."""

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

# Seconds that one call may take; that it takes in the ordinary; and that calls may take beyond
# the ordinary, all together.
_LONGEST_CALL: Final = 0.25
ORDINARY_CALL: Final = 0.003
_EXCESS: Final = 2.0
# Of each second that passes, the part by which the excess is forgiven.
_FORGIVEN: Final = 0.05

# A judge works on the event loop, where others wait for every call: of what a call may take in the
# ordinary, the part that one of its tokens may; and seconds that any call may take.
_OF_A_CALL: Final = 1 / 30
_LONGEST_JUDGEMENT: Final = 0.02

# Tokens after which a matcher that computes no masks computes one: that gives the lexer its fuel.
# A lexer that runs out of it is lost, to all that share it.
REFUELED_TOKENS: Final = 8
# Seconds of compiling within which the thread that follows grammars may compile one anew.
_QUICKLY_COMPILED: Final = 0.05

# How the library speaks of a token that was not in the mask.
_NOT_ALLOWED: Final = "doesn't satisfy the grammar"
_MAX_MESSAGE_CHARS: Final = 300
_QUOTED_LINE: Final = re.compile(r"\n *[0-9]+ \|")


# Where a grammar leaves no choice the library would choose the tokens; the model does, so that a
# mask follows from the text alone, whatever tokens a request forbids.
_OPTIONS: Final = '%llguidance {"no_forcing": true}'


class Candidate(msgspec.Struct, frozen=True):
    """A grammar's text that nobody has read yet: Lark, or GBNF that is to be turned into that."""

    text: str
    is_gbnf: bool = False


class GrammarError(Exception):
    """A grammar cannot be compiled or followed; the message is for the client."""


def parser_limits() -> LLParserLimits:
    """What bounds the work on one grammar."""
    return LLParserLimits(
        step_lexer_fuel=MATCHER_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def with_options(lark: str) -> str:
    """A grammar with what all are compiled with."""
    return f"{lark}\n{_OPTIONS}\n"


def compile_matcher(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """A matcher at the beginning of the output, with its first mask computed.

    Raises
    ------
    GrammarError
        The grammar has a fault or does not end well within its limits, or nothing matches it.
    """
    text = with_options(lark)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    raise_fault(matcher)
    matcher.compute_bitmask()
    raise_fault(matcher)
    return matcher


def raise_fault(matcher: LLMatcher) -> None:
    """Raise what has put a matcher into its error state.

    Raises
    ------
    GrammarError
        If it is in that.
    """
    if matcher.is_error():
        raise GrammarError(fault_of(matcher))


def fault_of(matcher: LLMatcher) -> str:
    """Why a matcher is in its error state, in one short line."""
    # The lines of the grammar that follow are the client's own.
    message = _QUOTED_LINE.split(matcher.get_error().partition("<non-verbose/>")[0])[0]
    if message.strip() == "NoExtensionBias":
        return "no text conforms to it, or none that the model's tokens can spell"
    return " ".join(message.split())[:_MAX_MESSAGE_CHARS] or "the grammar cannot be followed"


def is_stuck(matcher: LLMatcher) -> bool:
    """Whether a matcher is in its error state because nothing continues, or another thing did.

    Of a lexer that is lost it says that too; any other bound it names.
    """
    message = matcher.get_error()
    return message.strip().startswith("NoExtensionBias") or _NOT_ALLOWED in message


class TimeBudget:
    """What following one grammar may take, of all its rows together.

    Many rows of one grammar wait for each other, so a budget of each row would be many. It fills up
    again, slowly: a grammar that is a little slow may be followed for as long as the server runs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._excess = 0.0
        self._updated = clock()

    def allows(self, seconds: float, num_calls: float = 1) -> bool:
        """Whether calls that took so long together are within it; they are counted."""
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
        At the beginning of the output; never moved.
    tokenizer
        Of the vocabulary that it was compiled for.
    lanes
        The same as constraints. Those of different lanes can be followed side by side. There may
        be none.
    recompile
        Makes another matcher like the first, with a lexer of its own.
    compile_seconds
        How long it took to make the first one.

    Attributes
    ----------
    budget
        Of all that follow it.
    is_worn
        Whether a lane's lexer has taken all that it may: nobody begins with a constraint any more.
    is_spent
        Whether the matchers' lexer, which they share, has too: nobody can begin at all.
    num_renewals
        Lexers that matchers have had before this one.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        lanes: Sequence[Constraint] = (),
        recompile: Callable[[], LLMatcher] | None = None,
        compile_seconds: float = 0.0,
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._lanes = lanes
        self._recompile = recompile if compile_seconds <= _QUICKLY_COMPILED else None
        self.budget = TimeBudget()
        self.is_worn = False
        self.is_spent = False
        self.num_renewals = 0

    def begin(self, lane: int) -> Constraint | None:
        """One of a lane's constraints, at the beginning of the output, if there is any."""
        if not self._lanes or self.is_worn:
            return None
        return self._lanes[lane % len(self._lanes)].clone()

    def begin_matcher(self) -> LLMatcher:
        """A matcher at the beginning of the output."""
        return self._matcher.deep_copy()

    def examine(self) -> None:
        """A matcher has failed: find out whether another one could begin."""
        probe = self.begin_matcher()
        probe.compute_bitmask()
        self.is_spent = probe.is_error()

    def renew(self) -> bool:
        """Where the matchers' lexer is lost, give those that begin another one; whether it did.

        Blocks for as long as a quick compilation takes; a slow grammar stays as it is.
        """
        self.examine()
        if not self.is_spent or self._recompile is None:
            return False
        self._matcher = self._recompile()
        self.is_spent = False
        self.num_renewals += 1
        return True

    def judge(self) -> TextJudge:
        """Follows the text of one output."""
        return TextJudge(self._matcher.deep_copy(), self._tokenizer.greedy_tokenize, self.budget)


class TextJudge:
    """Tells whether a text that grows is complete under a grammar.

    It goes by the text, and not by the tokens that the model chose: a stop string may end within
    one. Text that the grammar does not know, such as special tokens that are hidden from it, is
    beyond it: everything is complete from there on. Where the matcher gives up instead, over its
    limits or over the budget of all who follow the grammar, nobody can tell any more, and nothing
    is: a stop string is plain text then, since a cut at it could break what was asked for.

    Text that is held back is taken once, character by character, however many stop strings end in
    it: where it is complete is remembered until it is let out.
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
        # Text that the matcher has taken and that was not let out, the tokens of each character,
        # and whether it is complete after each number of them.
        self._ahead = ""
        self._ahead_tokens: list[int] = []
        self._ahead_complete: list[bool] = []
        # What the grammar does not know, where that follows.
        self._barred: str | None = None

    def advance(self, text: str) -> None:
        """The text goes on with this."""
        # Without text there is nothing to follow: it may be held back.
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
        """Whether the text would be complete if it went on with this and ended."""
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
        """Take what is held back; whether the grammar knows it there."""
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
        """Give back what was taken ahead and does not begin the text; how much of it does."""
        if text.startswith(self._ahead) or self._ahead.startswith(text):
            return min(len(text), len(self._ahead))
        # Of strings, not of paths.
        known = len(commonprefix([text, self._ahead]))  # noqa: RUF071
        if not self._matcher.rollback(sum(self._ahead_tokens[known:])):
            self._has_given_up = True
        self._ahead, self._barred = self._ahead[:known], None
        del self._ahead_tokens[known:], self._ahead_complete[known + 1 :]
        return known

    def _consume(self, token_ids: list[int]) -> int:
        """How many of the tokens the matcher took."""
        taken = 0
        while taken < len(token_ids) and not self._has_given_up:
            chunk = token_ids[taken : taken + REFUELED_TOKENS - self._num_tokens]
            started = time.thread_time()
            count = self._matcher.try_consume_tokens(chunk)
            self._charge(started, len(chunk) * _OF_A_CALL)
            taken += count
            is_short = count < len(chunk)
            # Without fuel the lexer takes nothing either: only behind a mask that is believed.
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
