"""Of the detokenizer, and of stop strings."""

from tests.mutants.mutation import rewrites_of

_DETOKENIZER_TESTS = ("tests/text/test_detokenizer.py", "tests/text/test_output.py")
_STOP_TESTS = ("tests/text/test_stop_strings.py", "tests/text/test_output.py")

_POOL = "tests/text/test_template_pool.py"

MUTATIONS = (
    *rewrites_of(
        "src/text/template_process.py",
        (
            f"{_POOL}::test_values_of_all_kinds_arrive_as_they_are",
            f"{_POOL}::test_memory_is_bounded_and_given_back",
            f"{_POOL}::test_a_process_knows_no_secret_and_may_do_nothing",
            f"{_POOL}::test_renderings_share_a_budget_of_cpu_time",
        ),
        (
            "a process that renders may take all memory",
            "_settle",
            "_limit(resource.RLIMIT_AS, A + B)",
            "",
        ),
        (
            "a process that renders keeps the most memory that it ever had",
            "main",
            "A and _peak_bytes() > B + _GROWTH_BYTES",
            "False",
        ),
        (
            "a process that renders may start others",
            "_settle",
            "(resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)",
            "(resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)",
        ),
        (
            "renderings use up no budget",
            "_answer",
            "A - B",
            "0.0",
        ),
        (
            "a lone surrogate ends the process that renders",
            "Answer.encoded",
            "self.text.encode('utf-8', 'surrogatepass')",
            "self.text.encode()",
        ),
    ),
    *rewrites_of(
        "src/text/template_renderer.py",
        (
            f"{_POOL}::test_a_process_knows_no_secret_and_may_do_nothing",
            f"{_POOL}::test_a_process_that_speaks_otherwise_is_ended",
            f"{_POOL}::test_a_conversation_that_is_too_much_does_not_shut_the_template",
        ),
        (
            "a process that renders knows the server's secrets",
            "_environment",
            "{A: B for A, B in os.environ.items() if A in _VARIABLES or A.startswith(_PREFIXES)}",
            "{A: B for A, B in os.environ.items()}",
        ),
        (
            "an answer of any length is received",
            "Renderer._receive",
            "A > HEADER_BYTES + MAX_ANSWER_BYTES",
            "False",
        ),
        (
            "what a process says unasked is a part of its answer",
            "Renderer._receive",
            "len(A) > B",
            "False",
        ),
        (
            "the end of CPU time counts as an accident",
            "Renderer._ended",
            "A or B == -signal.SIGPROF",
            "A",
        ),
    ),
    *rewrites_of(
        "src/text/template_pool.py",
        (
            f"{_POOL}::test_so_many_may_wait",
            f"{_POOL}::test_short_conversations_go_on_beside_a_long_one",
            f"{_POOL}::test_long_is_what_has_much_text_or_many_messages",
            f"{_POOL}::test_one_that_died_idle_is_replaced_unnoticed",
            f"{_POOL}::test_a_conversation_that_is_too_much_does_not_shut_the_template",
            f"{_POOL}::test_a_clients_template_that_was_out_of_bounds_is_not_tried_again_at_once",
            f"{_POOL}::test_new_templates_of_clients_do_not_keep_known_ones_waiting",
            f"{_POOL}::test_closing_ends_everything",
            f"{_POOL}::test_owners_take_turns",
            f"{_POOL}::test_one_owner_leaves_room_to_others",
            f"{_POOL}::test_what_one_owner_has_a_template_do_shuts_it_to_nobody_else",
        ),
        (
            "all owners stand in one line",
            "TemplatePool.submit",
            "(self._light if A else self._others).push(B, C)",
            "(self._light if A else self._others).push('', C)",
        ),
        (
            "one owner fills the pool's line",
            "TemplatePool._check_room",
            "A and B and (C + B + 2 > MAX_WAITING)",
            "False",
        ),
        (
            "a template that one owner misused is shut to all",
            "TemplatePool._check_allowed",
            "self._refused.get((A, B), 0.0)",
            "max((t for (_, k), t in self._refused.items() if k == B), default=0.0)",
        ),
        (
            "any number of conversations may wait to be rendered",
            "TemplatePool._check_room",
            "A >= MAX_WAITING",
            "False",
        ),
        (
            "long conversations keep short ones waiting",
            "TemplatePool._add_worker",
            "not self._workers",
            "True",
        ),
        (
            "new templates of clients keep known ones waiting",
            "TemplatePool.submit",
            "A and (not self._of_clients or self._is_quick(B))",
            "A",
        ),
        (
            "one conversation that is too much shuts the model's template",
            "TemplatePool._out_of_bounds",
            "self._of_clients",
            "True",
        ),
        (
            "a process that has died is not replaced",
            "TemplatePool._ask",
            "(False, True)",
            "(True,)",
        ),
        (
            "a client's template that was out of bounds is tried again and again",
            "TemplatePool._check_allowed",
            "self._refused.get((A, B), 0.0) > time.monotonic()",
            "False",
        ),
    ),
    *rewrites_of(
        "src/text/detokenizer.py",
        _DETOKENIZER_TESTS,
        (
            "text overtakes the beginning of a character",
            "IncrementalDetokenizer.push",
            "A.isascii() and (not self._utf8.buffer)",
            "A.isascii()",
        ),
        (
            "a special token that is skipped has text",
            "IncrementalDetokenizer.push",
            "b'' if A in B else C(A)",
            "C(A)",
        ),
        (
            "special tokens that are skipped have text where several come at once",
            "IncrementalDetokenizer.push",
            "b''.join([A(B) for B in C if B not in D])",
            "b''.join([A(B) for B in C])",
        ),
        (
            "an output without tokens has what the prompt ends with",
            "IncrementalDetokenizer.flush",
            "self._any_output",
            "True",
        ),
        (
            "a space is stripped from every text",
            "IncrementalDetokenizer._stripped",
            "self._strip_left -= 1",
            "",
        ),
        (
            "an id without a token is the first of the text",
            "IncrementalDetokenizer._push_one",
            "not A and (not self._pieces.exists(B))",
            "False",
        ),
        (
            "clean-up misses what is cut before its last character",
            "StreamingReplace.feed",
            "len(self._old) - 1",
            "len(self._old) - 2",
        ),
        (
            "clean-up loses what was held back",
            "IncrementalDetokenizer.flush",
            "A.feed(B) + A.finish()",
            "A.feed(B)",
        ),
        (
            "bytes of the prompt's beginning go on behind its end",
            "IncrementalDetokenizer._read_prompt",
            "self._utf8.reset()",
            "",
        ),
        (
            "a character that the prompt begins is lost",
            "IncrementalDetokenizer.__init__",
            "if not A:\n    self._utf8.decode(B)",
            "",
        ),
        (
            "a character that the prompt begins is shown where the text stands alone",
            "IncrementalDetokenizer.__init__",
            "if not A:\n    self._utf8.decode(B)",
            "self._utf8.decode(B)",
        ),
        (
            "the end of the prompt is read past special tokens that count as text",
            "IncrementalDetokenizer._visible_backwards",
            "(A for A in reversed(B) if A not in self._skipped)",
            "(A for A in reversed(B))",
        ),
        (
            "added tokens are put together behind text",
            "IncrementalDetokenizer._push_one",
            "A is not None and self._after_added",
            "A is not None",
        ),
    ),
    *rewrites_of(
        "src/text/stop_strings.py",
        _STOP_TESTS,
        (
            "a stop string that begins within a suppressed one is missed",
            "StopStrings.feed",
            "self._failures[A][B]",
            "0",
        ),
        (
            "the shortest of those that end together matches",
            "_automata",
            "-len(A)",
            "len(A)",
        ),
        (
            "the beginning of the longer stop string is shown",
            "StopStrings.feed",
            "max",
            "min",
        ),
        (
            "a beginning that is held back is shown late",
            "StopStrings.feed",
            "not self._held and self._first_characters.isdisjoint(A)",
            "self._first_characters.isdisjoint(A)",
        ),
        (
            "a beginning within a beginning is missed",
            "_advance",
            "while A and B[A] != C:\n    A = D[A]",
            "if A and B[A] != C:\n    A = D[A]",
        ),
        (
            "a stop string that is to be shown is not",
            "StopStrings._end",
            "A if self._include else A - len(B)",
            "A - len(B)",
        ),
        (
            "the held-back tail is shown twice",
            "StopStrings.finish",
            "A, self._held = (self._held, '')",
            "A = self._held",
        ),
        (
            "text that has no form ends at a stop string",
            "StopStrings.feed",
            "A and (self._may_end is None or self._may_end(B))",
            "A",
        ),
        (
            "text goes on behind a match",
            "StopStrings.feed",
            "if self.matched is not None:\n    return ('', self.matched)",
            "",
        ),
    ),
    *rewrites_of(
        "src/text/output.py",
        (*_STOP_TESTS, "tests/engine/grammar/test_fuel.py"),
        (
            "a stop string ends a text before its fewest tokens",
            "OutputText.push",
            "self.num_tokens >= self._min_tokens",
            "True",
        ),
        (
            "tokens behind a stop string count",
            "OutputText.push",
            "if A is not None:\n    return TextDelta(''.join(B), A, C)",
            "if A is not None:\n    return TextDelta(''.join(B), A, len(token_ids))",
        ),
        (
            "what is held back is lost at the end",
            "OutputText.finish",
            "B if A is not None else B + self._stops.finish()",
            "B",
        ),
        (
            "the replacement character of an incomplete character completes no stop string",
            "OutputText.finish",
            "self.num_tokens >= self._min_tokens",
            "False",
        ),
        (
            "tokens are taken behind a stop string",
            "OutputText.push",
            (
                "if self._stops.matched is not None:\n"
                "    return TextDelta('', self._stops.matched, 0)"
            ),
            "",
        ),
    ),
)
