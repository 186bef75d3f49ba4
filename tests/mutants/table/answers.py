"""Of the texts of chats: where thinking ends, calls within it, and forms of templates."""

from tests.mutants.mutation import rewrites_of

_FORMS = "tests/text/test_template_forms.py"

MUTATIONS = (
    *rewrites_of(
        "src/text/thinking.py",
        ("tests/text/test_thinking.py",),
        (
            "the shorter of two tags that end together ends the thinking",
            "ThinkingTracker._read",
            "A = max((B.num_matched for B in C))",
            "A = min((B.num_matched for B in C))",
        ),
        (
            "the token that begins the closing tag is thinking",
            "ThinkingTracker._read",
            "A >= B + C - D",
            "A > B + C - D",
        ),
        (
            "a beginning of a tag within a beginning is missed",
            "_Tag.takes",
            "self._failures[A]",
            "0",
        ),
        (
            "thinking has one token more than it may",
            "ThinkingGuide.forced",
            "A.num_tokens < self.budget",
            "A.num_tokens <= self.budget",
        ),
        (
            "an output of a grammar is cut within a character",
            "ThinkingGuide.forced",
            "A and B.is_within_character",
            "False",
        ),
        (
            "a character costs budget that there is not",
            "ThinkingGuide.forced",
            "A and B.is_within_character",
            "B.is_within_character",
        ),
        (
            "a tag is spelt by tokens that the model does not have",
            "endings_of",
            "b''.join(map(A.token_bytes, B)) == C and max(B) < D",
            "b''.join(map(A.token_bytes, B)) == C",
        ),
    ),
    *rewrites_of(
        "src/text/before_answer.py",
        ("tests/text/test_thinking.py",),
        (
            "a tag that comes but for its last character is missed",
            "BeforeAnswer.feed",
            "1",
            "2",
        ),
        (
            "what was shown already is cut off again",
            "BeforeAnswer.feed",
            "A = max(0, A - B)",
            "A -= B",
        ),
        (
            "the last of what ends thinking ends it",
            "BeforeAnswer._find_end",
            "min",
            "max",
        ),
        (
            "white space before what is no thinking is lost",
            "BeforeAnswer.finish",
            "''.join(self._spaces) + self._begun",
            "self._begun",
        ),
    ),
    *rewrites_of(
        "src/text/thought_calls.py",
        ("tests/text/test_thought_calls.py",),
        (
            "a call in thinking that was closed is one",
            "ThoughtCalls._read",
            "self._is_reading = False",
            "",
        ),
        (
            "white space before a call is shown",
            "ThoughtCalls._take",
            "A.rstrip()",
            "A",
        ),
        (
            "text behind a call in thinking is the answer",
            "ThoughtCalls.finish",
            "[_as_thought(A) for A in self._made]",
            "self._made",
        ),
        (
            "a template that shows no thinking leaves it open",
            "leaves_thinking_open",
            "A >= 0 and B >= 0 and (C >= 0) and (D not in E[C:B])",
            "A >= 0 and B >= 0 and (D not in E[C:B])",
        ),
        (
            "a template that closes thinking leaves it open",
            "leaves_thinking_open",
            "A >= 0 and B >= 0 and (C >= 0) and (D not in E[C:B])",
            "A >= 0 and B >= 0 and (C >= 0)",
        ),
    ),
    *rewrites_of(
        "src/text/template_forms.py",
        (
            f"{_FORMS}::test_the_first_of_the_forms_that_show_most",
            f"{_FORMS}::test_probes_of_a_template_that_never_ends_take_no_longer_than_a_rendering",
        ),
        (
            "of forms that show as much the last is used",
            "_CallProbe._best",
            "A > B[0]",
            "A >= B[0]",
        ),
        (
            "calls are sent one at a time to every template",
            "_CallProbe.forms",
            "self._shown(A, B) > self._shown(A, C)",
            "self._shown(A, B) >= self._shown(A, C)",
        ),
        (
            "a call that is shown twice is shown",
            "_Call.score",
            "A.count(self.value) != 1",
            "A.count(self.value) < 1",
        ),
        (
            "a null that a template prints without calls is a fault of theirs",
            "_CallProbe._shown",
            "self._nulls_without_calls",
            "0",
        ),
        (
            "probes take as long as they want",
            "TemplateForms.rendered",
            "self.fault is not None or A.seconds <= 0",
            "False",
        ),
        (
            "a template that does not end is rendered for each conversation",
            "TemplateForms.check",
            "self.fault is not None",
            "False",
        ),
    ),
    *rewrites_of(
        "src/text/call_ids.py",
        ("tests/text/test_call_ids.py",),
        (
            "a call that has its result waits for another",
            "_Ids.of_result",
            "self._waiting.pop(A, None)",
            "",
        ),
        (
            "an id that begins like one that fits stays",
            "_Ids._shorten",
            "_FITS.fullmatch",
            "_FITS.match",
        ),
        (
            "calls with empty ids are one call",
            "_Ids.of_call",
            "isinstance(A, str) and A != ''",
            "isinstance(A, str)",
        ),
        (
            "two calls may have one id",
            "_Ids._shorten",
            "if A not in self._taken:\n    break",
            "break",
        ),
    ),
)
