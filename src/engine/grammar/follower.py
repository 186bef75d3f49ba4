"""Where the output of one row stands in its grammar."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Final

from llguidance import LLMatcher

from src.engine.grammar.compiled import REFUELED_TOKENS, CompiledGrammar, fault_of, is_stuck
from src.engine.grammar.constraints import Constraint

_TOO_LARGE: Final = "the grammar takes more of the lexer than it may"
_TOO_SLOW: Final = "following the grammar takes too long"


class Follower:
    """One row's grammar, of the grammar thread alone.

    Attributes
    ----------
    matcher
        Where the output stands.
    token_ids
        What led there, but for the steps that its batch remembers.
    ended
        Whether an end token was sampled, or the grammar failed: nothing more is asked of it.
    fault, is_own
        Why it cannot go on, and whether by the request's own parameters.
    """

    __slots__ = (
        "_abandoned",
        "_grammar",
        "_num_renewals",
        "ended",
        "fault",
        "is_own",
        "key",
        "matcher",
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

    @property
    def is_live(self) -> bool:
        """Whether anybody wants to know more of it."""
        return not (self.ended or self.key in self._abandoned)

    def fail(self, reason: str, *, is_own: bool = True) -> None:
        """It cannot go on, by the request's own parameters or by the server's fault."""
        self.ended = True
        self.fault = reason
        self.is_own = is_own

    def resume(self, token_ids: list[int]) -> None:
        """The output begins with these, as a matcher learns now."""
        self.token_ids = list(token_ids)
        self._restart()

    def charge(self, seconds: float, num_calls: int) -> None:
        """Its matcher took so long for some calls; where that is beyond its budget it fails."""
        if not self._grammar.budget.allows(seconds, num_calls):
            self.fail(_TOO_SLOW)

    def recover(self, *, is_complete: bool = False) -> bool:
        """Leave what failed, or may be complete, for another matcher; whether that gets on."""
        had_constraint = isinstance(self.matcher, Constraint)
        if not had_constraint and not self._renew():
            # Another one would come to the same end.
            self.give_up()
            return False
        self._restart()
        if self.is_live and had_constraint and not is_complete:
            # The lane's lexer has taken all that it may, or the constraint would have got on too.
            self._grammar.is_worn = True
        return self.is_live

    def give_up(self) -> None:
        """Its matcher is in its error state."""
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
        """Bring a matcher to where the output stands.

        One whose lexer is lost on the way has done that to all that share it: then once more with
        a new one, and as carefully as it can be done.
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
        """Whether a matcher that begins now has another lexer than this one, which failed.

        That a lexer is lost looks like tokens that the grammar does not allow.
        """
        started = time.thread_time()
        is_renewed = self._grammar.num_renewals > self._num_renewals or self._grammar.renew()
        self.charge(time.thread_time() - started, 1)
        return is_renewed

    def _replay(self, step: int) -> None:
        """Begin with a matcher and give it the output, with a mask behind each few tokens."""
        self._num_renewals = self._grammar.num_renewals
        matcher = self.matcher = self._grammar.begin_matcher()
        for start in range(0, len(self.token_ids), step):
            if not self.is_live or matcher.is_error():
                return
            chunk = self.token_ids[start : start + step]
            # This thread's own time: a machine that is busy with other things is no fault of it.
            started = time.thread_time()
            taken = matcher.try_consume_tokens(chunk)
            # It gives the lexer its fuel, and tells whether the lexer had too little.
            matcher.compute_bitmask()
            if taken < len(chunk) and not matcher.is_error():
                matcher.consume_tokens(chunk[taken:])
                matcher.compute_bitmask()
            self.charge(time.thread_time() - started, len(chunk) + 1)
