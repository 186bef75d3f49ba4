"""Of the detokenizer, and of stop strings."""

from tests.mutants.mutation import mutations_of

_DETOKENIZER_TESTS = ("tests/text/test_detokenizer.py", "tests/text/test_output.py")
_STOP_TESTS = ("tests/text/test_stop_strings.py", "tests/text/test_output.py")

_POOL = "tests/text/test_template_pool.py"

MUTATIONS = (
    *mutations_of(
        "src/text/template_process.py",
        (
            f"{_POOL}::test_values_of_all_kinds_arrive_as_they_are",
            f"{_POOL}::test_memory_is_bounded_and_given_back",
            f"{_POOL}::test_a_process_knows_no_secret_and_may_do_nothing",
            f"{_POOL}::test_renderings_share_a_budget_of_cpu_time",
        ),
        (
            "a process that renders may take all memory",
            "    _limit(resource.RLIMIT_AS, used + memory_bytes)\n",
            "",
        ),
        (
            "a process that renders keeps the most memory that it ever had",
            "        if is_large and _peak_bytes() > settled + _GROWTH_BYTES:\n",
            "        if False:\n",
        ),
        (
            "a process that renders may start others",
            "resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)",
            "resource.RLIMIT_FSIZE)",
        ),
        (
            "renderings use up no budget",
            "return Answer(kind, text, granted - left)",
            "return Answer(kind, text, 0.0)",
        ),
        (
            "a lone surrogate ends the process that renders",
            'self.text.encode("utf-8", "surrogatepass")',
            "self.text.encode()",
        ),
    ),
    *mutations_of(
        "src/text/template_renderer.py",
        (
            f"{_POOL}::test_a_process_knows_no_secret_and_may_do_nothing",
            f"{_POOL}::test_a_process_that_speaks_otherwise_is_ended",
            f"{_POOL}::test_a_conversation_that_is_too_much_does_not_shut_the_template",
        ),
        (
            "a process that renders knows the server's secrets",
            "        if name in _VARIABLES or name.startswith(_PREFIXES)\n",
            "",
        ),
        (
            "an answer of any length is received",
            "                if length > HEADER_BYTES + MAX_ANSWER_BYTES:\n",
            "                if False:\n",
        ),
        (
            "what a process says unasked is a part of its answer",
            "        if len(received) > length:\n",
            "        if False:\n",
        ),
        (
            "the end of CPU time counts as an accident",
            "is_late=is_late or status == -signal.SIGPROF",
            "is_late=is_late",
        ),
    ),
    *mutations_of(
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
            "(self._light if is_light else self._others).push(owner, job)",
            '(self._light if is_light else self._others).push("", job)',
        ),
        (
            "one owner fills the pool's line",
            "if owner and own and waiting + own + 2 > MAX_WAITING:",
            "if False:",
        ),
        (
            "a template that one owner misused is shut to all",
            "self._refused.get((owner, key), 0.0)",
            "max((t for (_, k), t in self._refused.items() if k == key), default=0.0)",
        ),
        (
            "any number of conversations may wait to be rendered",
            "if waiting >= MAX_WAITING:",
            "if False:",
        ),
        (
            "long conversations keep short ones waiting",
            "worker = _Worker(takes_all=not self._workers)",
            "worker = _Worker(takes_all=True)",
        ),
        (
            "new templates of clients keep known ones waiting",
            "is_short and (not self._of_clients or self._is_quick(source))",
            "is_short",
        ),
        (
            "one conversation that is too much shuts the model's template",
            "        if self._of_clients:\n            with self._lock:\n",
            "        if True:\n            with self._lock:\n",
        ),
        (
            "a process that has died is not replaced",
            "        for is_last_try in (False, True):\n",
            "        for is_last_try in (True,):\n",
        ),
        (
            "a client's template that was out of bounds is tried again and again",
            "is_refused = self._refused.get((owner, key), 0.0) > time.monotonic()",
            "is_refused = False",
        ),
    ),
    *mutations_of(
        "src/text/detokenizer.py",
        _DETOKENIZER_TESTS,
        (
            "text overtakes the beginning of a character",
            "if data.isascii() and not self._utf8.buffer:",
            "if data.isascii():",
        ),
        (
            "a special token that is skipped has text",
            'data = b"" if token_id in skipped else later(token_id)',
            "data = later(token_id)",
        ),
        (
            "special tokens that are skipped have text where several come at once",
            "[later(i) for i in token_ids if i not in skipped]",
            "[later(i) for i in token_ids]",
        ),
        (
            "an output without tokens has what the prompt ends with",
            'if self._any_output else ""\n        for replacer',
            'if True else ""\n        for replacer',
        ),
        (
            "a space is stripped from every text",
            "                self._strip_left -= 1\n",
            "",
        ),
        (
            "an id without a token is the first of the text",
            "self._first = not piece and not self._pieces.exists(token_id)",
            "self._first = False",
        ),
        (
            "clean-up misses what is cut before its last character",
            "for n in range(min(len(self._old) - 1, len(rest)), -1, -1)",
            "for n in range(min(len(self._old) - 2, len(rest)), -1, -1)",
        ),
        (
            "clean-up loses what was held back",
            'if self._any_output else ""\n        for replacer in self._replacers:\n'
            "            text = replacer.feed(text) + replacer.finish()\n",
            'if self._any_output else ""\n        for replacer in self._replacers:\n'
            "            text = replacer.feed(text)\n",
        ),
        (
            "bytes of the prompt's beginning go on behind its end",
            "        self._utf8.reset()\n",
            "",
        ),
        (
            "a character that the prompt begins is lost",
            "        if not stands_alone:\n            self._utf8.decode(tail)\n",
            "",
        ),
        (
            "a character that the prompt begins is shown where the text stands alone",
            "        if not stands_alone:\n            self._utf8.decode(tail)\n",
            "        self._utf8.decode(tail)\n",
        ),
        (
            "the end of the prompt is read past special tokens that count as text",
            "return (i for i in reversed(token_ids) if i not in self._skipped)",
            "return (i for i in reversed(token_ids))",
        ),
        (
            "added tokens are put together behind text",
            "if content is not None and self._after_added:",
            "if content is not None:",
        ),
    ),
    *mutations_of(
        "src/text/stop_strings.py",
        _STOP_TESTS,
        (
            "a stop string that begins within a suppressed one is missed",
            "                    state = self._failures[i][state]\n",
            "                    state = 0\n",
        ),
        (
            "the shortest of those that end together matches",
            "sorted(set(stops), key=lambda stop: (-len(stop), stop))",
            "sorted(set(stops), key=lambda stop: (len(stop), stop))",
        ),
        (
            "the beginning of the longer stop string is shown",
            "certain = len(text) - max(states)",
            "certain = len(text) - min(states)",
        ),
        (
            "a beginning that is held back is shown late",
            "if not self._held and self._first_characters.isdisjoint(piece):",
            "if self._first_characters.isdisjoint(piece):",
        ),
        (
            "a beginning within a beginning is missed",
            "    while state and stop[state] != character:\n",
            "    if state and stop[state] != character:\n",
        ),
        (
            "a stop string that is to be shown is not",
            "return end if self._include else end - len(stop)",
            "return end - len(stop)",
        ),
        (
            "the held-back tail is shown twice",
            'tail, self._held = self._held, ""\n',
            "tail = self._held\n",
        ),
        (
            "text that has no form ends at a stop string",
            "if allow_match and (self._may_end is None or self._may_end(shown)):",
            "if allow_match:",
        ),
        (
            "text goes on behind a match",
            '        if self.matched is not None:\n            return "", self.matched\n',
            "",
        ),
    ),
    *mutations_of(
        "src/text/output.py",
        (*_STOP_TESTS, "tests/engine/grammar/test_fuel.py"),
        (
            "a stop string ends a text before its fewest tokens",
            "self._stops.feed(text, allow_match=self.num_tokens >= self._min_tokens)",
            "self._stops.feed(text, allow_match=True)",
        ),
        (
            "tokens behind a stop string count",
            'return TextDelta("".join(shown), stop, used)',
            'return TextDelta("".join(shown), stop, len(token_ids))',
        ),
        (
            "what is held back is lost at the end",
            "return before + (text if stop is not None else text + self._stops.finish())",
            "return before + text",
        ),
        (
            "the replacement character of an incomplete character completes no stop string",
            "text, stop = self._stops.feed(tail, allow_match=self.num_tokens >= self._min_tokens)",
            "text, stop = self._stops.feed(tail, allow_match=False)",
        ),
        (
            "tokens are taken behind a stop string",
            "        if self._stops.matched is not None:\n"
            '            return TextDelta("", self._stops.matched, 0)\n',
            "",
        ),
    ),
)
