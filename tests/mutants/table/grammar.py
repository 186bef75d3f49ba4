"""Of structured output: grammars of rows, their masks, and the judge of stop strings."""

from tests.mutants.mutation import rewrites_of

_FOLDER = "tests/engine/grammar"
_ROW_TESTS = (f"{_FOLDER}/test_row_grammars.py", f"{_FOLDER}/test_grammar_steps.py")
_KINDS = (f"{_FOLDER}/schemas/test_kinds.py",)
_JUDGE_TESTS = (f"{_FOLDER}/test_compiled.py", f"{_FOLDER}/test_fuel.py")


def _rows(*names: str) -> tuple[str, ...]:
    """Single tests of the rows' file, which as a whole takes long."""
    return tuple(f"{_FOLDER}/test_row_grammars.py::test_{name}" for name in names)


MUTATIONS = (
    *rewrites_of(
        "src/engine/grammar/row_grammars.py",
        _ROW_TESTS,
        (
            "rows are moved by the tokens of another batch",
            "RowGrammars._take",
            "A is None or A.rows != B or self._ended or (len(A.history) == _HISTORY)",
            "A is None or self._ended or len(A.history) == _HISTORY",
        ),
        (
            "a batch's history is lost when somebody arrives",
            "RowGrammars._exchange",
            "self._dissolve()",
            "self._batch = None",
        ),
        (
            "a row that nothing could be sampled for is moved on",
            "RowGrammars._take",
            "A.min() < 0",
            "False",
        ),
        (
            "ended requests are still restricted",
            "RowGrammars._choose_masks",
            "A is None or A in self._ended",
            "A is None",
        ),
        (
            "a row is restricted by the grammar of its last owner",
            "RowGrammars._choose_masks",
            "A is None or A.key != B",
            "A is None",
            "a row's last follower is taken away before another is begun, on the thread that asks",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/masks.py",
        (f"{_FOLDER}/test_masks.py",),
        (
            "rows without a grammar may sample what another row may",
            "packed_masks",
            "A[[B for B, C in enumerate(D) if C < 0]] = -1",
            "",
        ),
        (
            "an output ends though it is to go on",
            "MaskTable.restrict_by_numpy",
            "np.where(self._constraints[A, None] == _MAY_NOT_END, 0, B)",
            "B",
        ),
        (
            "an output that may only end cannot",
            "MaskTable.restrict_by_numpy",
            "np.where(A.any(1, keepdims=True), B, -1)",
            "B",
        ),
        (
            "an output ends where its grammar does not allow it",
            "MaskTable.restrict_by_numpy",
            "np.where(A, B, 0)",
            "B",
        ),
        (
            "a row has the constraints of its last owner",
            "MaskTable.install",
            "self._constraints[A] = _UNCONSTRAINED",
            "",
        ),
        (
            "nobody learns that nothing is possible",
            "MaskTable.restrict_by_numpy",
            "None if bool(A.all()) else A.tolist()",
            "None",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/row_grammars.py",
        _rows(
            "masks_are_of_their_entries_and_free_rows_are_free",
            "an_ended_request_of_a_batch_is_not_moved",
            "keys_that_are_forgotten_are_forgotten_without_any_row",
            "those_behind_a_matcher_that_took_long_are_advanced",
            "what_is_queued_for_an_ended_request_is_skipped",
            "one_that_cannot_arrive_leaves_those_behind_it",
            "tokens_that_cannot_be_fail_the_rows_of_the_step",
            "whatever_is_allowed_leads_to_what_conforms",
        ),
        (
            "an ended request of a batch is moved on",
            "RowGrammars._take",
            "A is None or A.rows != B or self._ended or (len(A.history) == _HISTORY)",
            "A is None or A.rows != B or len(A.history) == _HISTORY",
        ),
        (
            "the grammar of an ended request is kept",
            "RowGrammars.forget",
            "self._held.pop(A, None)",
            "",
        ),
        (
            "a row that was given to somebody else stays constrained",
            "RowGrammars.vacate",
            "self._rows.pop(A, None) is not None",
            "False",
        ),
        (
            "a resumed row begins anew",
            "RowGrammars._arrive",
            "if A:\n    B.resume(A)",
            "if False:\n    B.resume(A)",
        ),
        (
            "one grammar that cannot be begun takes the others along",
            "RowGrammars._exchange",
            "logger.exception('a grammar could not be begun')\nself._followers.pop(A.row, None)",
            "raise",
        ),
        (
            "those behind a matcher that took long are not advanced",
            "RowGrammars._advance_matchers",
            "A.append(B.only(C))",
            "pass",
        ),
        (
            "keys of requests that left no row are kept",
            "RowGrammars.begin",
            "self._ended.difference_update(A)",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/follower.py",
        (
            *_rows(
                "a_resumed_output_that_was_not_allowed_fails_its_row",
                "a_row_over_its_budget_of_time_fails_alone",
                "a_dead_end_of_the_grammar_itself_is_no_fault_of_the_request",
            ),
            f"{_FOLDER}/test_fuel.py",
        ),
        (
            "tokens that a resumed row did not take are lost",
            "Follower._replay",
            "A < len(B) and (not C.is_error())",
            "False",
        ),
        (
            "a slow grammar is followed for ever",
            "Follower.charge",
            "self.fail(_TOO_SLOW)",
            "pass",
        ),
        (
            "a lexer that is lost is not renewed",
            "Follower._restart",
            "self.is_live and self._has_failed and self._renew()",
            "False",
        ),
        (
            "a dead end of the server's is the request's own",
            "Follower.give_up",
            "self.fail(f'a dead end of the grammar: {A}', is_own=False)",
            "self.fail(f'a dead end of the grammar: {A}')",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/grammar_steps.py",
        (
            *_rows("those_behind_a_matcher_that_took_long_are_advanced"),
            f"{_FOLDER}/test_grammar_steps.py",
        ),
        (
            "an end token is given to the grammar",
            "_make_one",
            "if A.ends(B, C):\n    return Outcome.ENDED",
            "",
        ),
        (
            "some of a batch's rows are moved by others' tokens",
            "GrammarSteps.only",
            "self.numbers[list(A), 2]",
            "self.numbers[:len(A), 2]",
        ),
        (
            "a matcher that failed has moved",
            "_make_one",
            "Outcome.MATCHER_FAILED",
            "Outcome.ADVANCED",
        ),
        (
            "what is behind a slow matcher waits for nobody",
            "make_by_python",
            "A is not Outcome.ADVANCED or B.seconds > ORDINARY_CALL",
            "A is not Outcome.ADVANCED",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/compiled.py",
        _JUDGE_TESTS,
        (
            "a judge without fuel looks for ever",
            "TextJudge._consume",
            "if A and self._num_tokens == B == 0:\n    break",
            "",
        ),
        (
            "a judge believes a lexer without fuel",
            "TextJudge._consume",
            "A or self._num_tokens >= REFUELED_TOKENS",
            "self._num_tokens >= REFUELED_TOKENS",
        ),
        (
            "text beyond the grammar is never complete",
            "TextJudge.advance",
            "self._is_beyond = True",
            "self._has_given_up = True",
        ),
        (
            "a judge that has given up calls everything complete",
            "TextJudge.completes",
            "return not self._has_given_up",
            "return True",
        ),
        (
            "the time that grammars take adds up to nothing",
            "TimeBudget.allows",
            "A <= _LONGEST_CALL and self._excess <= _EXCESS",
            "A <= _LONGEST_CALL",
        ),
        (
            "one call may take as long as it wants",
            "TimeBudget.allows",
            "A <= _LONGEST_CALL and self._excess <= _EXCESS",
            "self._excess <= _EXCESS",
        ),
        (
            "what took too long is never forgiven",
            "TimeBudget.allows",
            "(A - self._updated) * _FORGIVEN",
            "0.0",
        ),
        (
            "what a judge took ahead stays taken",
            "TextJudge._back_to",
            "not self._matcher.rollback(sum(self._ahead_tokens[A:]))",
            "False",
        ),
        (
            "a judge remembers what it took of other text",
            "TextJudge._back_to",
            "del self._ahead_tokens[A:], self._ahead_complete[A + 1:]",
            "",
        ),
        (
            "text that was let out is still ahead",
            "TextJudge.advance",
            "del self._ahead_tokens[:A], self._ahead_complete[:A]",
            "",
        ),
        (
            "a character that was barred once is barred behind other text",
            "TextJudge._look_ahead",
            "self._ahead, self._barred = (self._ahead + A, None)",
            "self._ahead = self._ahead + A",
        ),
        (
            "a token that a grammar did not take stays half taken",
            "TextJudge._look_ahead",
            "not self._matcher.rollback(A)",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/grammar_text.py",
        (
            f"{_FOLDER}/test_compiler.py::test_as_much_as_is_allowed_is_taken",
            f"{_FOLDER}/test_compiled.py",
        ),
        (
            "brackets within strings count as depth",
            "_check_depth",
            "_STRING.sub('', A)",
            "A",
        ),
        (
            "the deepest schema that is allowed is refused",
            "_check_depth",
            "A > B",
            "A >= B",
        ),
        (
            "as many choices as are allowed are refused",
            "_choice",
            "len(A) > B",
            "len(A) >= B",
        ),
        (
            "as many bytes as are allowed are refused",
            "_check_text",
            "A > B.max_bytes",
            "A >= B.max_bytes",
        ),
        (
            "white space has no bound",
            "_WHITE_SPACE",
            "'[ \\\\t\\\\r\\\\n]{1,64}'",
            "'[ \\\\t\\\\r\\\\n]+'",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/thinking.py",
        (f"{_FOLDER}/test_thinking.py",),
        (
            "a step does not wait where a budget is spent",
            "RowThinking.may_force",
            "A >= B[1]",
            "A > B[1]",
        ),
        (
            "steps wait for thinking that is over",
            "RowThinking.may_force",
            "A is not None and B >= A[1] and (not A[0].is_over)",
            "A is not None and B >= A[1]",
        ),
        (
            "a row has the thinking of its last owner",
            "RowThinking.apply",
            "self._thoughts.pop(A, None)",
            "",
        ),
        (
            "a request that resumes may think as long again",
            "RowThinking.apply",
            "A.take(B)",
            "pass",
        ),
        (
            "a token that could not be sampled is thinking",
            "RowThinking.take",
            "A >= 0",
            "True",
        ),
        (
            "thinking that was lost goes on",
            "RowThinking.lose",
            "self._thoughts[A].is_lost = True",
            "pass",
        ),
        (
            "an ended request's thinking stays in its row",
            "RowThinking.forget",
            "self.vacate(A)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/row_grammars.py",
        (f"{_FOLDER}/test_thinking.py",),
        (
            "a row without a grammar may choose at the end of its thinking",
            "RowGrammars._choose_masks",
            "if A in B:\n    continue",
            "",
        ),
        (
            "thinking is followed beside grammars alone",
            "RowGrammars.follow",
            "not self._rows.keys().isdisjoint(A) or self._thinking.follows(A)",
            "not self._rows.keys().isdisjoint(A)",
        ),
        (
            "a budget that is spent has masks beside grammars alone",
            "RowGrammars.masks",
            "A and (not self._thinking.may_force(B, C))",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/schemas/objects.py",
        _KINDS,
        (
            "required names do not count where an open object has a least number of them",
            "_at_least",
            "{'properties': dict.fromkeys(A, False), 'minProperties': B + len(C)}",
            "{'properties': dict.fromkeys(A, False), 'minProperties': B}",
        ),
        (
            "required names do not count among several that an open object must have",
            "_at_least",
            "_exactly(A, B, C + len(D), None)",
            "_exactly(A, B, C, None)",
        ),
        (
            "required names do not count among those that an open object may have",
            "_of_open",
            "len(A) + len(B)",
            "len(A)",
            "such an alternative has more required names than it may have, and so no instance",
        ),
        (
            "required names count twice where a closed object has a greatest number",
            "count",
            "None if A is None else A - len(B)",
            "None if A is None else A - 2 * len(B)",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/schemas/knowledge.py",
        _KINDS,
        (
            "branches that share one number exclude each other",
            "_above",
            "A > B or (A == B and 'exclusive' in C + D)",
            "A >= B",
        ),
        (
            "branches that touch in a number that one excludes are not told apart",
            "_above",
            "A > B or (A == B and 'exclusive' in C + D)",
            "A > B",
            "each then excludes the other's instances, of which it has none",
        ),
        (
            "branches that share one length exclude each other",
            "_over",
            "A > B",
            "A >= B",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/schemas/complement.py",
        _KINDS,
        (
            "the number where two branches touch is of neither, or of both",
            "_BOUNDS",
            "('number', 'exclusiveMaximum', 0)",
            "('number', 'maximum', 0)",
        ),
        (
            "what is above an exclusive bound has the bound in it",
            "_BOUNDS",
            "('number', 'minimum', 0)",
            "('number', 'exclusiveMinimum', 0)",
        ),
        (
            "the length where two branches touch is of both",
            "_BOUNDS",
            "('string', 'maxLength', -1)",
            "('string', 'maxLength', 0)",
        ),
        (
            "the number of items where two branches touch is of both",
            "_BOUNDS",
            "('array', 'minItems', 1)",
            "('array', 'minItems', 0)",
        ),
    ),
)
