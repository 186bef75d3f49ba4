"""Of drafts: their bounds in plans, and their verification."""

from tests.mutants.mutation import mutations_of, rewrites_of

_PURE = (
    "tests/engine/scheduling/test_drafts.py",
    "tests/engine/scheduling/test_drafts_come_last.py",
    "tests/engine/scheduling/test_properties.py",
)
_ENGINE = ("tests/engine/speculation",)

MUTATIONS = (
    *mutations_of(
        "src/engine/scheduling/request_state.py",
        _PURE,
        (
            "what steps in flight compute is bounded by drafts alone",
            "self.slack = self.target - min(known + len(self.ahead), self.limit)",
            "self.slack = 0",
        ),
        (
            "a commit does not correct what was launched",
            "        if self.ahead.pop(0) > 1 or self.slack:\n            self._bound()",
            "        self.ahead.pop(0)",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/scheduler.py",
        _PURE,
        (
            "what follows the token that ends a request is kept",
            "                return kept, reason\n",
            "                return len(token_ids), reason\n",
        ),
        (
            "a row that rests is offered drafts",
            "            state.rests = max(0, row.rests - len(state.ahead))\n",
            "            pass\n",
        ),
        (
            "a step's last token counts as computed",
            "            state.committed += num_tokens\n",
            "            state.committed += num_tokens + 1\n",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/planning.py",
        _PURE,
        (
            "drafts exceed the budget",
            "most = min(limits.max_num_batched_tokens - builder.num_tokens, "
            "limits.max_sampled - sampled)",
            "most = limits.max_sampled - sampled",
        ),
        (
            "drafts make logits of any size",
            "most = min(limits.max_num_batched_tokens - builder.num_tokens, "
            "limits.max_sampled - sampled)",
            "most = limits.max_num_batched_tokens - builder.num_tokens",
        ),
        (
            "the first rows take all drafts",
            "drafts = min(drafts, -(-most // (len(wanted) - given)))",
            "drafts = min(drafts, most)",
        ),
        (
            "drafts reach where recurrent states are copied",
            "drafts = min(drafts, snapshots.until_next(state) - 1)",
            "pass",
        ),
        (
            "drafts leave no position for the step behind them",
            "return state.capacity - state.launched - self.kept",
            "return state.capacity - state.launched",
        ),
        (
            "near the end of a text only what is left of its last block is drafted",
            "            return state.limit\n",
            "            return state.capacity - state.launched\n",
        ),
        (
            "drafts take blocks while a request waits",
            "spare = -1 if len(self.waiting) else None",
            "spare = None",
        ),
        (
            "drafts keep one position for however many steps are planned behind them",
            "        self.kept = max(self.kept, num_in_flight)\n",
            "",
        ),
        (
            "blocks that were lent for drafts stay while a request waits",
            "            len(self.waiting) or allocator.pool.num_free < allocator.longest\n",
            "            allocator.pool.num_free < allocator.longest\n",
        ),
        (
            "somebody is preempted for a block that perhaps nobody needs",
            "spares = state.slack > 0 or allocator.blocks_are_coming()",
            "spares = allocator.blocks_are_coming()",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/row_allocator.py",
        _PURE,
        (
            "drafts in flight count twice, and a table grows past the context's end",
            "end = min(state.launched + num_tokens, state.max_kv_tokens)",
            "end = state.launched + num_tokens",
        ),
        (
            "drafts take the blocks that rows need soon",
            "return self.pool.num_free - sum(map(self.lookahead, self.running))",
            "return self.pool.num_free",
        ),
        (
            "drafts in flight reserve blocks, and a request waits for them",
            "certain = state.target - state.slack",
            "certain = state.target",
        ),
        (
            "drafts are lent the blocks that a request will want",
            "lent = max(0, (spare - self.longest) // len(short))",
            "lent = spare // len(short)",
        ),
        (
            "what steps in flight may write is given to others",
            "reach = blocks_for(state.launched + (kept if state.slack else 0), size)",
            "reach = 0",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/pace.py",
        ("tests/engine/scheduling/test_pace.py",),
        (
            "a step that verifies drafts takes as long as one without",
            "return self._verify if drafts else self._decode",
            "return self._decode",
        ),
        (
            "a step that verifies drafts is one with a prompt",
            "if plan.num_tokens - drafts > len(plan.rows):",
            "if plan.num_tokens > len(plan.rows):",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/verification.py",
        _ENGINE,
        (
            "a draft is accepted behind a wrong one",
            "_count_kept",
            "break",
            "continue",
        ),
        (
            "no draft is ever accepted",
            "_count_kept",
            "A += 1",
            "pass",
        ),
        (
            "a row begins where the plan says, not where it is",
            "Speculation.begin",
            "A = self._lengths.get(B.row, A)",
            "",
        ),
        (
            "rows whose drafts were wrong go on being asked in the plan",
            "Speculation.settle",
            "self._asking.resting.add(A.row)",
            "pass",
        ),
        (
            "drafts that were planned already leave a row resting",
            "Speculation.begin",
            "self._asking.resting.wake(A)",
            "pass",
        ),
        (
            "states keep what was rejected",
            "Speculation.settle",
            "self._states.restore(A)",
            "pass",
        ),
        (
            "a plan without drafts passes over states that are behind",
            "Speculation.begin",
            "_has_bounds(A) or self._states.are_behind(A)",
            "_has_bounds(A)",
        ),
        (
            "a step that computed nothing is a very fast one",
            "Speculation.observe",
            "if A: self._widths.took(B, C, D)",
            "self._widths.took(B, C, D)",
        ),
        (
            "ended rows wait for ever to catch up",
            "Speculation.leave",
            "self._states.vacate(A)",
            "",
        ),
        (
            "a row keeps the pause of the request before",
            "Speculation.install",
            "self._widths.vacate(A)",
            "",
        ),
        (
            "rows of before a preemption wait for ever to catch up",
            "Speculation.install",
            "self._states.vacate(A); self._asking.vacate(A); del self._keys[A]",
            "self._asking.vacate(A); del self._keys[A]",
        ),
        (
            "what a failed step has left is a text",
            "Speculation.leave",
            "0 if A in self._failed else B",
            "B",
        ),
        (
            "a text ends where its prompt does",
            "Speculation._end",
            "return bisect_left(A.data, True, B, key=C)",
            "return B",
        ),
        (
            "steps without drafts take as long as asking does",
            "Speculation.observe",
            "A or not self._has_asked",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/resting_rows.py",
        ("tests/engine/speculation/test_verification.py",),
        (
            "a row that missed its step is looked at when its next pause ends",
            "RestingRows.due",
            "self._widths.asks_again()",
            "pass",
        ),
        (
            "a woken row is said to rest",
            "RestingRows.wake",
            "self._resting.discard(A)",
            "pass",
        ),
        (
            "a row rests beyond its request",
            "RestingRows.vacate",
            "self._resting.discard(A)",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/places.py",
        ("tests/engine/speculation/test_lookup.py",),
        (
            "what lies across tokens is a place",
            "_found_among_bytes",
            "A % B == 0",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/asking.py",
        _ENGINE,
        (
            "the device drafts past a request's end",
            "Asking.most",
            "min(A.drafts, A.limit - B - 1)",
            "A.drafts",
        ),
        (
            "rows with a grammar have the drafts of others",
            "Asking.guesses",
            "not A[B]",
            "False",
        ),
        (
            "the device waits for rows that never have drafts",
            "Asking.most",
            "self._restrictions.never_drafts(A.row)",
            "False",
        ),
        (
            "what a grammar forces counts as guessed",
            "Asking._possible",
            "_common(A.token_ids, B)",
            "B",
        ),
        (
            "a drafter that fails is asked again and again",
            "Asking.attempt",
            "self._drafters.remove(A)",
            "",
        ),
        (
            "the first guess is taken, however unlikely",
            "Asking._likeliest",
            "A >= _LIKELY_ENOUGH",
            "True",
        ),
        (
            "of unlikely guesses the last is taken",
            "Asking._likeliest",
            "A > B",
            "True",
        ),
        (
            "drafters compute for rows that have a likely guess",
            "Asking.guesses",
            "A.likelihood < _LIKELY_ENOUGH",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/asking.py",
        ("tests/engine/speculation/test_verification.py",),
        (
            "whatever asking for rows with a grammar costs, they are asked again at once",
            "Asking._possible",
            "self._saved < 0",
            "False",
        ),
        (
            "where asking costs more, a row whose drafts were right is asked again at once",
            "Asking.verified",
            "self._widths.found_nothing(A, restricted=True, costs_more=True)",
            "pass",
        ),
        (
            "where asking costs more, the next request is asked for at once",
            "Asking.most",
            "self._saved < 0",
            "False",
        ),
        (
            "a request waits because the one before it in its row has",
            "Asking.vacate",
            "self._begun.discard(A)",
            "",
        ),
        (
            "what one row saves is saved by all rows",
            "Asking.took",
            "self._gained / len(A.rows)",
            "self._gained",
        ),
        (
            "one disturbed step ends asking for rows with a grammar",
            "Asking.took",
            "min(A, _MOST_LONGER)",
            "A",
        ),
        (
            "who computes is asked for rows that have a likely guess",
            "Asking.guesses",
            "A.likelihood < _LIKELY_ENOUGH",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/states_behind.py",
        _ENGINE,
        (
            "accepted tokens are missing in states that were given back",
            "StatesBehind.from_states",
            "self._behind.pop(A.row, 0)",
            "0",
        ),
        (
            "any number of tokens is computed again at once",
            "StatesBehind.narrow",
            "min(A[B], C - D)",
            "A[B]",
        ),
        (
            "a row that is far behind never catches up",
            "StatesBehind.narrow",
            "not A or B > _LONGEST_CERTAIN",
            "not A",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/snapshots.py",
        ("tests/engine/scheduling/test_drafts.py",),
        (
            "states are copied behind drafts in flight",
            "if state.slack or end % self._block_size",
            "if end % self._block_size",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/look_ahead.py",
        ("tests/engine/speculation/test_restricted.py",),
        (
            "the masks behind drafts stay in the row",
            "LookAhead._by_grammar",
            "A[:] = B",
            "pass",
        ),
        (
            "what is not known behind a draft is free",
            "LookAhead._by_grammar",
            "np.zeros_like(A)",
            "np.full_like(A, -1)",
        ),
        (
            "thinking is not forced behind drafts",
            "LookAhead.masks_behind",
            "B is not None",
            "False",
        ),
        (
            "drafts end outputs",
            "LookAhead._without_end",
            "self._table.ends(A, B)",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/compiled.py",
        ("tests/engine/grammar/test_look_ahead.py",),
        (
            "a grammar that was slow ahead once has no drafts for ever",
            "CompiledGrammar.took_long_ahead",
            "time.monotonic() + _SLOW_SECONDS",
            "float('inf')",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/follower.py",
        ("tests/engine/grammar/test_look_ahead.py",),
        (
            "long outputs are looked ahead of",
            "Follower.drafts",
            "self._grammar.is_slow_ahead or len(self.token_ids) > _LONGEST_OUTPUT",
            "self._grammar.is_slow_ahead",
        ),
        (
            "masks behind drafts take any time",
            "Follower.masks_behind",
            "if time.thread_time() - A > ORDINARY_CALL * B: break",
            "",
        ),
        (
            "a grammar that is slow ahead is asked again",
            "Follower._look_at_time",
            "self.never_drafts = True",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/grammar/follower.py",
        ("tests/engine/speculation/test_restricted.py",),
        (
            "accepted drafts are missing in the output of a grammar",
            "Follower.take",
            "self.token_ids += A",
            "pass",
        ),
        (
            "what a grammar forces is no draft",
            "Follower._drafts",
            "len(A) < B and C is not None and (not D.is_error())",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/lookup.py",
        ("tests/engine/speculation/test_lookup.py",),
        (
            "a look-up reads the whole text",
            "Lookup.propose",
            "tokens[-_WINDOW:]",
            "tokens",
        ),
        (
            "every place of the longest match is followed",
            "Lookup.propose",
            "A = A[-_MOST_FOLLOWED:]",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/places.py",
        ("tests/engine/speculation/test_lookup.py",),
        (
            "every place of a common end is measured",
            "places_of",
            "np.flatnonzero(A)[-_MOST_PLACES:]",
            "np.flatnonzero(A)",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/predictions.py",
        ("tests/engine/requests/test_predictions.py",),
        (
            "a prediction is tokenized for each prompt",
            "PredictedOutput.packed",
            "self._packed is not None",
            "False",
        ),
        (
            "all of a predicted text is tokenized",
            "PredictedOutput.packed",
            "A[:B * _CHARS_PER_TOKEN]",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/scheduling/waiting.py",
        ("tests/engine/scheduling/test_scheduler.py",),
        (
            "predictions wait for nothing",
            "Lane.count",
            "A = self._count_prediction(B.request, C)",
            "A = 0",
        ),
        (
            "a shared prediction counts with each request",
            "Lane._count_prediction",
            "0 if A and B else C",
            "C",
        ),
    ),
    *rewrites_of(
        "src/engine/sampling/processors.py",
        ("tests/engine/sampling/test_processors.py",),
        (
            "a processor that fails behind a draft ends requests",
            "ProcessorGroup.apply",
            "() if A else self._firsts",
            "()",
        ),
        (
            "a processor that fails at a guess is said to end requests",
            "ProcessorGroup.apply",
            "() if A else self._firsts",
            "self._firsts",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/prediction.py",
        ("tests/engine/speculation/test_prediction.py",),
        (
            "a prediction is never found again",
            "Predicted._advance",
            "A.agreed = B",
            "A.agreed = 0",
        ),
        (
            "the first place is meant, wherever the output left",
            "Predicted._advance",
            "np.searchsorted(A, B)",
            "0",
        ),
        (
            "a row has the prediction of the request before",
            "Predicted.install",
            "self._rows.pop(A, None)",
            "",
        ),
        (
            "all of a long prediction is looked through",
            "Predicted._advance",
            "A.text[B : C + _BEHIND]",
            "A.text[B:]",
        ),
        (
            "a long output is looked for where its prediction begins",
            "Predicted._advance",
            "len(A) > _BEHIND",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/history.py",
        ("tests/engine/speculation/test_history.py",),
        (
            "a client's drafts tell what others were told",
            "SharedHistory.propose",
            "self._scopes[A] == B",
            "True",
        ),
        (
            "what was overwritten is a guess",
            "SharedHistory.propose",
            "np.array_equal(A, B)",
            "True",
        ),
        (
            "texts run into each other",
            "SharedHistory.leave",
            "self._tokens[A] = _NOTHING; self._scopes[B] = C",
            "self._scopes[B] = C",
        ),
        (
            "all that has ended is entered in one step",
            "SharedHistory.catch_up",
            "min(A, B + C)",
            "A",
        ),
        (
            "ends across two steps are not entered",
            "SharedHistory._enter",
            "max(A, B + C - 1)",
            "max(A, A + C - 1)",
        ),
        (
            "what was forgotten is found",
            "SharedHistory.forget",
            "self._numbers.clear()",
            "pass",
        ),
        (
            "requests that had begun leave what they say, though all was forgotten",
            "SharedHistory.forget",
            "self._forgotten_key = A",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/asking.py",
        (
            "tests/engine/drafters/test_exactness.py::test_rows_with_a_grammar_are_guessed_from_their_own_text",
        ),
        (
            "look-ups for rows with a grammar serve all rows",
            "_for_free",
            "[A for A in B if not isinstance(A, C)]",
            "list(B)",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/inspector.py",
        ("tests/engine/speculation/test_exactness.py",),
        (
            "who resets the cache of prefixes leaves what was said",
            "Inspector.reset_prefix_cache",
            "A.worker.forget_history()",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/core/step_message.py",
        ("tests/engine/speculation/test_exactness.py",),
        (
            "owners share what they were told",
            "DeviceRequest.of",
            "request.tenant",
            '""',
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/widths.py",
        ("tests/engine/speculation/test_widths.py",),
        (
            "drafts are asked for that hardly pay",
            "Widths.none_pays",
            "_WORTH",
            "1",
        ),
        (
            "nobody's step is too long for a neighbour's drafts",
            "Widths._count",
            "if A > B: continue",
            "if False: continue",
        ),
        (
            "a row that fails is asked in every step",
            "Widths._pause",
            "A.until = B",
            "A.until = 0",
        ),
        (
            "what wrong drafts make again is free",
            "Widths._taken",
            "1 + (A + B) * (C[B] - D)",
            "1",
        ),
        (
            "asking takes as long as it likes",
            "Widths.found_nothing",
            "A < self._asking",
            "False",
        ),
        (
            "rows pause one by one",
            "Widths._pause",
            "(self._step + 1 + A) // B * B",
            "self._step + 1 + A",
        ),
        (
            "what drafts cost is never tried",
            "Widths._is_probe",
            "A >= B",
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/row_owners.py",
        ("tests/engine/speculation/test_together.py",),
        (
            "a preempted request is kept with each of its rows",
            "RowOwners.forget",
            "A == B[-1]",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/state_memory.py",
        ("tests/engine/speculation/test_states.py",),
        (
            "rows with drafts take rows where memory is tight",
            "plan_states",
            "max(1, A * 3 // 4) if B else A - C",
            "max(1, (A - C) * 3 // 4) if B else A - C",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/memory_profile.py",
        ("tests/engine/execution/test_state_memory.py",),
        (
            "no step is larger than its plan",
            "most_tokens",
            "A + MOST_AGAIN if B else A",
            "A",
        ),
    ),
    *rewrites_of(
        "src/engine/sizing/start.py",
        ("tests/engine/sizing/test_against_engines.py",),
        (
            "the shared history takes no memory",
            "_size",
            "history_bytes(A, B)",
            "0",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/chances.py",
        ("tests/engine/speculation/test_widths.py",),
        (
            "a guess that failed once fails for ever",
            "Chances._mean",
            "A - B > _FORGOTTEN",
            "False",
        ),
        (
            "guesses of all places are counted together",
            "Chances.verified",
            "A[_at(_PLACES, B)]",
            "A[0]",
        ),
    ),
    *rewrites_of(
        "src/engine/speculation/costs.py",
        ("tests/engine/speculation/test_widths.py",),
        (
            "what was measured long ago weighs as ever",
            "Costs.took",
            "A > _LONG_AGO",
            "False",
        ),
        (
            "an old step is compared with",
            "Costs.is_measured",
            "A <= _STALE",
            "True",
        ),
        (
            "a draft may be free",
            "Costs.price",
            "max(A, B)",
            "A",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/request_state.py",
        ("tests/engine/scheduling/test_drafts.py",),
        (
            "drafts behind the token that ends a request count as accepted",
            "accepted=0 if row is None else min(row.accepted, len(token_ids)),",
            "accepted=0 if row is None else row.accepted,",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/streams.py",
        ("tests/http/generation/test_prediction.py",),
        (
            "drafts of any source are the prediction's",
            "Choice._count_drafts",
            'A == "prediction"',
            "False",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/streams.py",
        ("tests/engine/requests/test_submission.py",),
        (
            "right drafts behind a stop string are tokens of the output",
            "Choice._count_drafts",
            "min(A.accepted, B)",
            "A.accepted",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/observer.py",
        ("tests/engine/speculation/test_exactness.py",),
        (
            "drafts behind a prompt's last token are tokens of the prompt",
            "EngineObserver.committed",
            "A.num_tokens - A.drafts",
            "A.num_tokens",
        ),
    ),
    *rewrites_of(
        "src/core/plan.py",
        ("tests/engine/scheduling/test_drafts.py",),
        (
            "a step whose rows had all ended has computed something",
            "has_computed",
            "any(A) or B",
            "True",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/memory_profile.py",
        ("tests/engine/execution/test_memory_profile.py",),
        (
            "logits of drafts are not counted",
            "_most_sampled",
            "most_drafts(A, B)",
            "0",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/inputs.py",
        _ENGINE,
        (
            "all of a row's tokens are sampled at the last",
            "build_inputs",
            "np.repeat(A, B) - 1 - C",
            "np.repeat(A, B) - 1",
        ),
    ),
)
