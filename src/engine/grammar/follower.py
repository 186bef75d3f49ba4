"""Where the output of one row stands in its grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from typing import Final

import numpy as np
from llguidance import LLMatcher

from src.engine.grammar.compiled import (
    ORDINARY_CALL,
    REFUELED_TOKENS,
    CompiledGrammar,
    fault_of,
    is_stuck,
)
from src.engine.grammar.constraints import Constraint
from src.engine.grammar.spelling import ForcedText

_TOO_LARGE: Final = "the grammar takes more of the lexer than it may"
_TOO_SLOW: Final = "following the grammar takes too long"
# Drafts of a step: their tokens and the one behind them are taken without a mask in between.
_MOST_DRAFTS: Final = REFUELED_TOKENS - 1
# The longest output, in tokens, behind which there are drafts: a copy of a matcher takes time for
# each of its tokens.
_LONGEST_OUTPUT: Final = 1024
# The longest output, in tokens, that a new matcher takes so that there can be drafts behind it.
_MOST_REPLAYED: Final = 256


class Follower:
    """One row's grammar. Only the grammar thread uses it.

    Attributes
    ----------
    matcher
        The state of the output in the grammar.
    token_ids
        The output tokens so far, without those in the batch's history.
    ended
        Whether an end token was sampled, or the grammar failed. It is not advanced any more.
    fault, is_own
        Why it cannot go on, and whether the request's own parameters are the cause.
    never_drafts
        Whether it has no drafts from now on: looking ahead takes too long.
    """

    __slots__ = (
        "_abandoned",
        "_ahead",
        "_forced",
        "_grammar",
        "_num_renewals",
        "ended",
        "fault",
        "is_own",
        "key",
        "matcher",
        "never_drafts",
        "token_ids",
    )

    def __init__(
        self, key: int, grammar: CompiledGrammar, lane: int | None, abandoned: Set[int]
    ) -> None:
        self.key = key
        self._grammar = grammar
        self._abandoned = abandoned
        begun = None if lane is None else self._grammar.begin(lane)
        self._num_renewals = self._grammar.num_renewals
        self.matcher: Constraint | LLMatcher = begun or self._grammar.begin_matcher()
        self.token_ids: list[int] = []
        self.ended = False
        self.fault: str | None = None
        self.is_own = True
        # A matcher in the constraint's place where drafts are looked for, the renewals that it has
        # seen, and how many tokens of the output it has.
        self._ahead: tuple[LLMatcher, int, int] | None = None
        self.never_drafts = False
        self._forced = ForcedText()

    @property
    def is_live(self) -> bool:
        """Whether it still has to be followed."""
        return not (self.ended or self.key in self._abandoned)

    def fail(self, reason: str, *, is_own: bool = True) -> None:
        """Mark it as failed; ``is_own``: by the request's own parameters, not by the server."""
        self.ended = True
        self.fault = reason
        self.is_own = is_own

    def resume(self, token_ids: list[int]) -> None:
        """Start from an output that has these tokens already."""
        self.token_ids = list(token_ids)
        self._restart()

    def charge(self, seconds: float, num_calls: int) -> None:
        """Charge the grammar's budget with some calls; beyond the budget this fails."""
        if not self._grammar.budget.allows(seconds, num_calls):
            self.fail(_TOO_SLOW)

    def take(self, token_ids: list[int]) -> None:
        """The output goes on with accepted drafts. Another token follows, with a mask behind it."""
        assert isinstance(self.matcher, LLMatcher), "a constraint has no drafts"
        self.token_ids += token_ids
        started = time.thread_time()
        taken = self.matcher.try_consume_tokens(token_ids)
        self.charge(time.thread_time() - started, len(token_ids))
        if self.is_live and taken < len(token_ids):
            self.recover()

    def drafts(self, guessed: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` drafts: of those guessed what the grammar allows, and what it forces then.

        It looks at a copy, so the matcher stays as it is. Nothing here fails the request: where a
        grammar takes too long, or a copy fails, there are no drafts.
        """
        if not self.is_live:
            return []
        if self._grammar.is_slow_ahead or len(self.token_ids) > _LONGEST_OUTPUT:
            self.never_drafts = True
        matcher = None if self.never_drafts else self._drafting_matcher()
        if matcher is None:
            self.never_drafts = True
            return []
        started = time.thread_time()
        drafts = self._drafts(matcher.deep_copy(), guessed, min(most, _MOST_DRAFTS))
        self._look_at_time(started, 2 + len(drafts))
        # A constraint is faster, but has no drafts.
        if drafts and self._ahead is not None:
            self.matcher, self._num_renewals, _ = self._ahead
            self._ahead = None
        return drafts

    def masks_behind(
        self, drafts: Sequence[int], mask: np.ndarray, restrict: Callable[[], bool]
    ) -> list[np.ndarray | None]:
        """The masks of the positions behind each of these drafts, which `drafts` returned.

        Without one (None) no token is possible there, or it is not known which: the step takes none
        of what follows, and the next one finds out.

        Parameters
        ----------
        mask
            [W] int32, where each is computed.
        restrict
            Restricts it by the request's other parameters; whether any token is left.
        """
        masks: list[np.ndarray | None] = [None] * len(drafts)
        assert isinstance(self.matcher, LLMatcher), "a constraint has no drafts"
        started = time.thread_time()
        matcher, num_calls = self.matcher.deep_copy(), 2 * len(drafts)
        for place, token_id in enumerate(drafts):
            # One of them may take long.
            if time.thread_time() - started > ORDINARY_CALL * num_calls:
                break
            if not matcher.consume_token(token_id):
                break
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if matcher.is_error() or not restrict():
                break
            masks[place] = mask.copy()
        self._look_at_time(started, num_calls)
        return masks

    def _drafts(self, matcher: LLMatcher, guessed: Sequence[int], most: int) -> list[int]:
        """See `drafts`; advances the matcher, which is a copy."""
        drafts = list(guessed[:most])
        del drafts[matcher.try_consume_tokens(drafts) :]
        spelling = self._grammar.spelling
        if len(drafts) < most and spelling is not None and not matcher.is_error():
            output = [*self.token_ids, *drafts]
            forced = self._forced.behind(spelling, output, matcher.compute_ff_bytes)
            forced = forced[: most - len(drafts)]
            drafts += forced[: matcher.try_consume_tokens(forced)]
        return [] if matcher.is_error() else drafts

    def _drafting_matcher(self) -> LLMatcher | None:
        """The matcher, which can be copied; beside a constraint one in the same state."""
        if isinstance(self.matcher, LLMatcher):
            return self.matcher
        matcher, renewals, start = self._ahead or (
            self._grammar.begin_matcher(),
            self._grammar.num_renewals,
            0,
        )
        if len(self.token_ids) - start > _MOST_REPLAYED:
            return None
        for first in range(start, len(self.token_ids), REFUELED_TOKENS):
            chunk = self.token_ids[first : first + REFUELED_TOKENS]
            if matcher.try_consume_tokens(chunk) < len(chunk):
                # The constraint goes on, so the request does not fail.
                return None
            matcher.compute_bitmask()
        self._ahead = matcher, renewals, len(self.token_ids)
        return matcher

    def _look_at_time(self, started: float, num_calls: int) -> None:
        """Let there be no more drafts if these calls have taken much longer than ordinary ones."""
        if time.thread_time() - started > ORDINARY_CALL * num_calls:
            self.never_drafts = True
            self._grammar.took_long_ahead()

    def recover(self, *, is_complete: bool = False) -> bool:
        """Replace a failed, or perhaps complete, matcher by a new one; whether that goes on."""
        had_constraint = isinstance(self.matcher, Constraint)
        if not had_constraint and not self._renew():
            # A new matcher with the same lexer would fail in the same way.
            self.give_up()
            return False
        self._restart()
        if self.is_live and had_constraint and not is_complete:
            # The constraint failed where a matcher goes on, so the lane's lexer is at its limit.
            self._grammar.is_worn = True
        return self.is_live

    def give_up(self) -> None:
        """Fail with the reason of the matcher's error state."""
        assert isinstance(self.matcher, LLMatcher)
        self._grammar.examine()
        reason = fault_of(self.matcher)
        if not is_stuck(self.matcher):
            self.fail(reason)
        elif self._grammar.is_spent:
            self.fail(_TOO_LARGE)
        else:
            self.fail(f"a dead end of the grammar: {reason}", is_own=False)

    def _restart(self) -> None:
        """Make a new matcher, and advance it by the whole output.

        If the shared lexer is lost on the way, this is repeated once with a new lexer and with a
        mask after every token.
        """
        self._replay(REFUELED_TOKENS)
        if self.is_live and self._has_failed and self._renew():
            self._replay(1)
        if self.is_live and self._has_failed:
            self.give_up()

    @property
    def _has_failed(self) -> bool:
        return isinstance(self.matcher, LLMatcher) and self.matcher.is_error()

    def _renew(self) -> bool:
        """Whether a new matcher has another lexer than the failed one; renews the lexer if needed.

        A lost lexer cannot be distinguished from tokens that the grammar does not allow.
        """
        started = time.thread_time()
        is_renewed = self._grammar.num_renewals > self._num_renewals or self._grammar.renew()
        self.charge(time.thread_time() - started, 1)
        return is_renewed

    def _replay(self, step: int) -> None:
        """Give the output to a new matcher, and compute a mask after every ``step`` tokens."""
        self._num_renewals = self._grammar.num_renewals
        self._ahead = None
        matcher = self.matcher = self._grammar.begin_matcher()
        for start in range(0, len(self.token_ids), step):
            if not self.is_live or matcher.is_error():
                return
            chunk = self.token_ids[start : start + step]
            # CPU time of this thread, so that a busy machine does not count.
            started = time.thread_time()
            taken = matcher.try_consume_tokens(chunk)
            # A mask refuels the lexer, and shows whether it had too little fuel.
            matcher.compute_bitmask()
            if taken < len(chunk) and not matcher.is_error():
                matcher.consume_tokens(chunk[taken:])
                matcher.compute_bitmask()
            self.charge(time.thread_time() - started, len(chunk) + 1)
