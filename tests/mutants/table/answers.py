"""Of the texts of chats: where thinking ends, calls within it, and forms of templates."""

from tests.mutants.mutation import mutations_of

_FORMS = "tests/text/test_template_forms.py"

MUTATIONS = (
    *mutations_of(
        "src/text/thinking.py",
        ("tests/text/test_thinking.py",),
        (
            "the shorter of two tags that end together ends the thinking",
            "length = max(tag.num_matched for tag in complete)",
            "length = min(tag.num_matched for tag in complete)",
        ),
        (
            "the token that begins the closing tag is thinking",
            "sum(start >= begin + index - length for start in self._starts)",
            "sum(start > begin + index - length for start in self._starts)",
        ),
        (
            "a beginning of a tag within a beginning is missed",
            "            state = self._failures[state]\n        self.num_matched",
            "            state = 0\n        self.num_matched",
        ),
        (
            "thinking has one token more than it may",
            "tracker.num_tokens < self.budget:",
            "tracker.num_tokens <= self.budget:",
        ),
        (
            "an output of a grammar is cut within a character",
            "        if completes_characters and tracker.is_within_character:\n",
            "        if False:\n",
        ),
        (
            "a character costs budget that there is not",
            "        if completes_characters and tracker.is_within_character:\n",
            "        if tracker.is_within_character:\n",
        ),
        (
            "a tag is spelt by tokens that the model does not have",
            "== tag and max(known) < vocab_size:",
            "== tag:",
        ),
    ),
    *mutations_of(
        "src/text/before_answer.py",
        ("tests/text/test_thinking.py",),
        (
            "a tag that comes but for its last character is missed",
            "seen[max(0, len(seen) - self._longest + 1) :]",
            "seen[max(0, len(seen) - self._longest + 2) :]",
        ),
        (
            "what was shown already is cut off again",
            "            end = max(0, end - known)\n",
            "            end -= known\n",
        ),
        (
            "the last of what ends thinking ends it",
            "return min(found)[1] if found else -1",
            "return max(found)[1] if found else -1",
        ),
        (
            "white space before what is no thinking is lost",
            'held = "".join(self._spaces) + self._begun',
            "held = self._begun",
        ),
    ),
    *mutations_of(
        "src/text/thought_calls.py",
        ("tests/text/test_thought_calls.py",),
        (
            "a call in thinking that was closed is one",
            "            shown += self._release()\n            self._is_reading = False\n",
            "            shown += self._release()\n",
        ),
        (
            "white space before a call is shown",
            "            certain = text.rstrip()\n",
            "            certain = text\n",
        ),
        (
            "text behind a call in thinking is the answer",
            "return shown + [_as_thought(event) for event in self._made]",
            "return shown + self._made",
        ),
        (
            "a template that shows no thinking leaves it open",
            "called >= 0 and opened >= 0 and closing",
            "called >= 0 and closing",
        ),
        (
            "a template that closes thinking leaves it open",
            " and closing not in text[opened:called]",
            "",
        ),
    ),
    *mutations_of(
        "src/text/template_forms.py",
        (
            f"{_FORMS}::test_the_first_of_the_forms_that_show_most",
            f"{_FORMS}::test_probes_of_a_template_that_never_ends_take_no_longer_than_a_rendering",
        ),
        (
            "of forms that show as much the last is used",
            "                if score > best[0]:\n",
            "                if score >= best[0]:\n",
        ),
        (
            "calls are sent one at a time to every template",
            "self._shown(several, apart) > self._shown(several, forms)",
            "self._shown(several, apart) >= self._shown(several, forms)",
        ),
        (
            "a call that is shown twice is shown",
            "rendered.count(self.value) != 1",
            "rendered.count(self.value) < 1",
        ),
        (
            "a null that a template prints without calls is a fault of theirs",
            "_nulls(rendered) > self._nulls_without_calls",
            "_nulls(rendered) > 0",
        ),
        (
            "probes take as long as they want",
            "if self.fault is not None or budget.seconds <= 0:",
            "if False:",
        ),
        (
            "a template that does not end is rendered for each conversation",
            "        if self.fault is not None:\n            raise",
            "        if False:\n            raise",
        ),
    ),
    *mutations_of(
        "src/text/call_ids.py",
        ("tests/text/test_call_ids.py",),
        (
            "a call that has its result waits for another",
            "        self._waiting.pop(shortened, None)\n",
            "",
        ),
        (
            "an id that begins like one that fits stays",
            "_FITS.fullmatch(given)",
            "_FITS.match(given)",
        ),
        (
            "calls with empty ids are one call",
            'named = isinstance(given, str) and given != ""',
            "named = isinstance(given, str)",
        ),
        (
            "two calls may have one id",
            "                if shortened not in self._taken:\n                    break\n",
            "                break\n",
        ),
    ),
)
