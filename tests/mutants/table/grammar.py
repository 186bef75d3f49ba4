"""Of structured output: grammars of rows, their masks, and the judge of stop strings."""

from tests.mutants.mutation import mutations_of

_FOLDER = "tests/engine/grammar"
_ROW_TESTS = (f"{_FOLDER}/test_row_grammars.py", f"{_FOLDER}/test_moves.py")
_KINDS = (f"{_FOLDER}/schemas/test_kinds.py",)
_JUDGE_TESTS = (f"{_FOLDER}/test_compiled.py", f"{_FOLDER}/test_fuel.py")


def _rows(*names: str) -> tuple[str, ...]:
    """Single tests of the rows' file, which as a whole takes long."""
    return tuple(f"{_FOLDER}/test_row_grammars.py::test_{name}" for name in names)


MUTATIONS = (
    *mutations_of(
        "src/engine/grammar/row_grammars.py",
        _ROW_TESTS,
        (
            "rows are moved by the tokens of another batch",
            "if batch is None or batch.rows != rows or self._ended",
            "if batch is None or self._ended",
        ),
        (
            "a batch's history is lost when somebody arrives",
            "        self._dissolve()\n        for row in departures:",
            "        self._batch = None\n        for row in departures:",
        ),
        (
            "a row that nothing could be sampled for is moved on",
            "        if token_ids.min() < 0:\n",
            "        if False:\n",
        ),
        (
            "ended requests are still restricted",
            "if owner is None or owner in self._ended:",
            "if owner is None:",
        ),
        (
            "a row is restricted by the grammar of its last owner",
            "if follower is None or follower.key != owner:",
            "if follower is None:",
            "a row's last follower is taken away before another is begun, on the thread that asks",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/masks.py",
        (f"{_FOLDER}/test_masks.py",),
        (
            "rows without a grammar may sample what another row may",
            "    packed[[entry for entry, row in enumerate(rows) if row < 0]] = -1\n",
            "",
        ),
        (
            "an output ends though it is to go on",
            "kept = np.where(self._constraints[chosen, None] == _MAY_NOT_END, 0, allowed)",
            "kept = allowed",
        ),
        (
            "an output that may only end cannot",
            "ends &= np.where(others.any(1, keepdims=True), kept, -1)",
            "ends &= kept",
        ),
        (
            "an output ends where its grammar does not allow it",
            "self.masks[chosen] = others | np.where(may_end, ends, 0)",
            "self.masks[chosen] = others | ends",
        ),
        (
            "a row has the constraints of its last owner",
            "            self._constraints[row] = _UNCONSTRAINED\n            return\n",
            "            return\n",
        ),
        (
            "nobody learns that nothing is possible",
            "return None if bool(possible.all()) else possible.tolist()",
            "return None",
        ),
    ),
    *mutations_of(
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
            "or batch.rows != rows or self._ended or len(batch.history)",
            "or batch.rows != rows or len(batch.history)",
        ),
        (
            "the grammar of an ended request is kept",
            "        self._held.pop(key, None)\n",
            "",
        ),
        (
            "a row that was given to somebody else stays constrained",
            "        if self._rows.pop(row, None) is not None:\n",
            "        if False:\n",
        ),
        (
            "a resumed row begins anew",
            "        if output_token_ids:\n            follower.resume",
            "        if False:\n            follower.resume",
        ),
        (
            "one grammar that cannot be begun takes the others along",
            '                    logger.exception("a grammar could not be begun")\n'
            "                    self._followers.pop(arrival.row, None)\n",
            "                    raise\n",
        ),
        (
            "those behind a matcher that took long are not advanced",
            "is_live]:\n                    left.append(part.only(live))\n",
            "is_live]:\n                    pass\n",
        ),
        (
            "keys of requests that left no row are kept",
            "            self._ended.difference_update(forgotten)\n            return\n",
            "            return\n",
        ),
    ),
    *mutations_of(
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
            "            if taken < len(chunk) and not matcher.is_error():\n",
            "            if False:\n",
        ),
        (
            "a slow grammar is followed for ever",
            "            self.fail(_TOO_SLOW)\n",
            "            pass\n",
        ),
        (
            "a lexer that is lost is not renewed",
            "if self.is_live and self._has_failed and self._renew():",
            "if False:",
        ),
        (
            "a dead end of the server's is the request's own",
            'self.fail(f"a dead end of the grammar: {reason}", is_own=False)',
            'self.fail(f"a dead end of the grammar: {reason}")',
        ),
    ),
    *mutations_of(
        "src/engine/grammar/grammar_steps.py",
        (
            *_rows("those_behind_a_matcher_that_took_long_are_advanced"),
            f"{_FOLDER}/test_moves.py",
        ),
        (
            "an end token is given to the grammar",
            "        if table.ends(row, token_id):\n            return Outcome.ENDED\n",
            "",
        ),
        (
            "some of a batch's rows are moved by others' tokens",
            "some.numbers[:, 2] = self.numbers[list(chosen), 2]",
            "some.numbers[:, 2] = self.numbers[: len(chosen), 2]",
        ),
        (
            "a matcher that failed has moved",
            "        return Outcome.MATCHER_FAILED\n",
            "        return Outcome.ADVANCED\n",
        ),
        (
            "what is behind a slow matcher waits for nobody",
            "        if outcome is not Outcome.ADVANCED or made.seconds > ORDINARY_CALL:\n",
            "        if outcome is not Outcome.ADVANCED:\n",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/compiled.py",
        _JUDGE_TESTS,
        (
            "a judge without fuel looks for ever",
            "            if is_short and self._num_tokens == count == 0:\n                break\n",
            "",
        ),
        (
            "a judge believes a lexer without fuel",
            "if is_short or self._num_tokens >= REFUELED_TOKENS:\n                self._refuel()",
            "if self._num_tokens >= REFUELED_TOKENS:\n                self._refuel()",
        ),
        (
            "text beyond the grammar is never complete",
            "            self._is_beyond = True\n",
            "            self._has_given_up = True\n",
        ),
        (
            "a judge that has given up calls everything complete",
            "            return not self._has_given_up\n        if not self._ahead_complete",
            "            return True\n        if not self._ahead_complete",
        ),
        (
            "the time that grammars take adds up to nothing",
            "(seconds <= _LONGEST_CALL and self._excess <= _EXCESS)",
            "seconds <= _LONGEST_CALL",
        ),
        (
            "one call may take as long as it wants",
            "(seconds <= _LONGEST_CALL and self._excess <= _EXCESS)",
            "self._excess <= _EXCESS",
        ),
        (
            "what took too long is never forgiven",
            "forgiven = (now - self._updated) * _FORGIVEN",
            "forgiven = 0.0",
        ),
        (
            "what a judge took ahead stays taken",
            "        if not self._matcher.rollback(sum(self._ahead_tokens[known:])):\n",
            "        if False:\n",
        ),
        (
            "a judge remembers what it took of other text",
            "        del self._ahead_tokens[known:], self._ahead_complete[known + 1 :]\n",
            "",
        ),
        (
            "text that was let out is still ahead",
            "        del self._ahead_tokens[:known], self._ahead_complete[:known]\n",
            "",
        ),
        (
            "a character that was barred once is barred behind other text",
            "        self._ahead, self._barred = self._ahead + character, None\n",
            "        self._ahead = self._ahead + character\n",
        ),
        (
            "a token that a grammar did not take stays half taken",
            "            if not self._matcher.rollback(taken):\n",
            "            if False:\n",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/grammar_text.py",
        (
            f"{_FOLDER}/test_compiler.py::test_as_much_as_is_allowed_is_taken",
            f"{_FOLDER}/test_compiled.py",
        ),
        (
            "brackets within strings count as depth",
            '_BRACKET.findall(_STRING.sub("", schema))',
            "_BRACKET.findall(schema)",
        ),
        (
            "the deepest schema that is allowed is refused",
            "    if deepest > most:\n",
            "    if deepest >= most:\n",
        ),
        (
            "as many choices as are allowed are refused",
            "    if len(texts) > most:\n",
            "    if len(texts) >= most:\n",
        ),
        (
            "as many bytes as are allowed are refused",
            "    if size > bounds.max_bytes:\n",
            "    if size >= bounds.max_bytes:\n",
        ),
        (
            "white space has no bound",
            'r"[ \\t\\r\\n]{1,64}"',
            'r"[ \\t\\r\\n]+"',
        ),
    ),
    *mutations_of(
        "src/engine/grammar/thinking.py",
        (f"{_FOLDER}/test_row_thinking.py",),
        (
            "a step does not wait where a budget is spent",
            "position >= known[1] and not known[0].is_over",
            "position > known[1] and not known[0].is_over",
        ),
        (
            "steps wait for thinking that is over",
            "position >= known[1] and not known[0].is_over",
            "position >= known[1]",
        ),
        (
            "a row has the thinking of its last owner",
            "            self._thoughts.pop(row, None)\n            if thought is not None:",
            "            if thought is not None:",
        ),
        (
            "a request that resumes may think as long again",
            "                thought.take(token_ids)\n",
            "                pass\n",
        ),
        (
            "a token that could not be sampled is thinking",
            "                if token_id >= 0:\n",
            "                if True:\n",
        ),
        (
            "thinking that was lost goes on",
            "                self._thoughts[row].is_lost = True\n",
            "                pass\n",
        ),
        (
            "an ended request's thinking stays in its row",
            "                self.vacate(row)\n",
            "                pass\n",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/row_grammars.py",
        (f"{_FOLDER}/test_row_thinking.py",),
        (
            "a row without a grammar may choose at the end of its thinking",
            "            if entry in forced:\n                continue\n",
            "",
        ),
        (
            "thinking is followed beside grammars alone",
            "if not self._rows.keys().isdisjoint(rows) or self._thinking.follows(rows):",
            "if not self._rows.keys().isdisjoint(rows):",
        ),
        (
            "a budget that is spent has masks beside grammars alone",
            "        if is_free and not self._thinking.may_force(rows, positions):\n",
            "        if is_free:\n",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/schemas/objects.py",
        _KINDS,
        (
            "required names do not count where an open object has a least number of them",
            '            "minProperties": least + len(required),\n        }\n        return [*',
            '            "minProperties": least,\n        }\n        return [*',
        ),
        (
            "required names do not count among several that an open object must have",
            "return [_exactly(some, optional, least + len(required), None)",
            "return [_exactly(some, optional, least, None)",
        ),
        (
            "required names do not count among those that an open object may have",
            "        if len(some) + len(required) <= most\n",
            "        if len(some) <= most\n",
            "such an alternative has more required names than it may have, and so no instance",
        ),
        (
            "required names count twice where a closed object has a greatest number",
            "    most = None if most is None else most - len(required)\n",
            "    most = None if most is None else most - 2 * len(required)\n",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/schemas/knowledge.py",
        _KINDS,
        (
            "branches that share one number exclude each other",
            'if low > high or (low == high and "exclusive" in (least + most)):',
            "if low >= high:",
        ),
        (
            "branches that touch in a number that one excludes are not told apart",
            'if low > high or (low == high and "exclusive" in (least + most)):',
            "if low > high:",
            "each then excludes the other's instances, of which it has none",
        ),
        (
            "branches that share one length exclude each other",
            "isinstance(high, int) and low > high",
            "isinstance(high, int) and low >= high",
        ),
    ),
    *mutations_of(
        "src/engine/grammar/schemas/complement.py",
        _KINDS,
        (
            "the number where two branches touch is of neither, or of both",
            '"minimum": ("number", "exclusiveMaximum", 0)',
            '"minimum": ("number", "maximum", 0)',
        ),
        (
            "what is above an exclusive bound has the bound in it",
            '"exclusiveMaximum": ("number", "minimum", 0)',
            '"exclusiveMaximum": ("number", "exclusiveMinimum", 0)',
        ),
        (
            "the length where two branches touch is of both",
            '"minLength": ("string", "maxLength", -1)',
            '"minLength": ("string", "maxLength", 0)',
        ),
        (
            "the number of items where two branches touch is of both",
            '"maxItems": ("array", "minItems", 1)',
            '"maxItems": ("array", "minItems", 0)',
        ),
    ),
)
