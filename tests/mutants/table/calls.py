"""Of calls of tools: where values between tags end, and what other servers' calls become."""

from tests.mutants.mutation import rewrites_of

_VALUES = ("tests/text/test_values_between_tags.py",)

MUTATIONS = (
    *rewrites_of(
        "src/text/tool_calls/value_ends.py",
        _VALUES,
        (
            "a value ends at a closing tag with any text behind it",
            "ValueEnd._is_closed",
            "bool(A) or B.ends_within(C)",
            "True",
        ),
        (
            "a line that is a tag which closes the call ends the value that goes on behind it",
            "ValueEnd._is_closed_without",
            "bool(A and B) and (not (yield from self._goes_on()))",
            "bool(A and B)",
        ),
        (
            "a tag of calls behind one that closes the call ends the value without a call",
            "ValueEnd._is_closed_without",
            "A and (yield from self._has_call(B.openers.index(A)))",
            "A",
        ),
        (
            "text behind a call without the value's closing tag is a part of the value",
            "ValueEnd._goes_on",
            "A.is_cut_short",
            "True",
        ),
        (
            "a value that goes on for long behind a tag that closes the call ends there",
            "ValueEnd._goes_on",
            "A.looked_ahead >= MAX_AHEAD",
            "False",
        ),
        (
            "a call behind a long text is a part of the value of the call before it",
            "ValueEnd._goes_on",
            "self._is_in_doubt = True",
            "",
        ),
        (
            "a value that is cut short behind a tag that closes the call is whole",
            "ValueEnd._goes_on",
            "A.is_cut_short",
            "False",
        ),
        (
            "the next call's closing tag is taken for that of a value before it",
            "ValueEnd._goes_on",
            (
                "if A == B.closer:\n"
                "    C\n"
                "elif (yield from self._is_call(B.openers.index(A))):\n"
                "    return False"
            ),
            "if A == B.closer:\n    C",
        ),
        (
            "any closing tag in the text behind a call shows that its value goes on",
            "ValueEnd._goes_on",
            "if (yield from self._is_closed()):\n    return True",
            "return True",
        ),
        (
            "a function that is closed twice is a part of the value",
            "ValueEnd._is_closed",
            "A.closers.index(B)",
            "A.closers.index(B) + 1",
        ),
        (
            "a function that XML closes is the end of the call",
            "ValueEnd._is_closed",
            "A in B.closers[1:-1] and self._is_wrapped",
            "False",
        ),
        (
            "a closing tag that is left out before the next argument is missed",
            "ValueEnd._ends_at",
            "A or not B.on_lines",
            "not B.on_lines",
        ),
        (
            "an argument in the middle of a line ends the value before it",
            "ValueEnd._ends_at",
            "A or not B.on_lines",
            "True",
        ),
        (
            "the arguments of a quoted call end the value that quotes it",
            "ValueEnd._ends_at",
            "A == B.argument and (not C)",
            "A == B.argument",
        ),
        (
            "a quoted call is not seen to be one",
            "ValueEnd._ends_at",
            "A[B] += 1",
            "A[B] += 0",
        ),
        (
            "a tag that a text names hides the arguments behind it",
            "ValueEnd._ends_at",
            "A and B == 1",
            "B == 1",
        ),
        (
            "arguments behind a quoted call that stays open are a part of the value",
            "ValueEnd.up_to",
            "not (self._is_in_doubt and self._open_calls)",
            "True",
        ),
        (
            "text behind the closing tag of an argument made up is a part of it",
            "ValueEnd.up_to",
            "A == B.closer and self._is_made_up and (not self._quoted[0])",
            "False",
        ),
        (
            "a name between tags in a line ends the value before it",
            "ValueEnd._is_argument",
            "A or B.on_lines",
            "True",
        ),
        (
            "a value that quotes the beginning of a call has no end",
            "ValueEnd._is_closed_without",
            "not A.is_cut_short",
            "False",
        ),
        (
            "an answer that is cut short ends a value",
            "ValueEnd._is_closed_without",
            "not A.is_cut_short",
            "True",
        ),
        (
            "without the closing tags of one call the next one is a part of its value",
            "ValueEnd._is_closed_without",
            "if A and (yield from self._has_call(B.openers.index(A))):\n    return True",
            "",
        ),
        (
            "a value ends with a tag of the call within a line",
            "ValueEnd._is_closed_without",
            "bool(A and B)",
            "bool(B)",
        ),
        (
            "a list of functions in a value ends the call",
            "ValueEnd._is_closed_without",
            "A or B + 1 == len(C.closers) or (not self._is_wrapped)",
            "True",
        ),
        (
            "under a grammar a value ends where a tag is left out",
            "ValueEnd.up_to",
            "(A.closer,) if self._is_exact else A.all",
            "(A.closer,) if False else A.all",
        ),
        (
            "under a grammar the function's end is taken for the call's",
            "ValueEnd._is_closed_by_grammar",
            "B.closers[2:] if A == B.closers[1] else ()",
            "()",
        ),
    ),
    *rewrites_of(
        "src/text/tool_calls/member_calls.py",
        _VALUES,
        (
            "an argument's value ends at an argument that was given before",
            "_ArgumentWriter._takes",
            "bool(A) and A not in self._keys and (B or A in self._kinds)",
            "bool(A) and (B or A in self._kinds)",
        ),
        (
            "the line break before a tag of the next argument is a part of the value",
            "_ArgumentWriter._leaves_break_out",
            "self._tags.on_lines or not self._is_closed",
            "self._tags.on_lines",
        ),
        (
            "a last line break of a value is lost",
            "_ArgumentWriter._read_text",
            "A.argue(quoted_inside(B.held))",
            "pass",
        ),
        (
            "a call without its function's closing tag is text",
            "_ends",
            "yield from A.ahead(A.starts_with_any(B))",
            "False",
        ),
        (
            "a value without its opening tag is no value",
            "_read_glm",
            "A.starts_with",
            "A.expect",
        ),
    ),
    *rewrites_of(
        "src/text/source.py",
        _VALUES,
        (
            "what was looked at ahead is lost where the text is cut there",
            "Source.feed",
            "self._at if self._mark is None else self._mark",
            "self._at",
        ),
        (
            "a look ahead takes white space without an end",
            "Source.run",
            "A.match(self._buffer, self._at, self._at + B)",
            "A.match(self._buffer, self._at)",
        ),
        (
            "a tag behind the last character of a look ahead is seen where it has come already",
            "Source.up_to",
            "A == B and C > 0 and (D or self._ended)",
            "A == B and (D or self._ended)",
        ),
    ),
    *rewrites_of(
        "src/text/answer_grammar.py",
        (*_VALUES, "tests/text/test_forced_calls.py"),
        (
            "a forced text may go on behind the tag of an argument",
            "AnswerGrammar._texts_to_tags",
            "f'/(.|\\\\n)*{A}/ & {B}'",
            "f'/(.|\\\\n)*{A}/'",
        ),
        (
            "a forced call ends without an argument that is required",
            "AnswerGrammar._members_and_end",
            "not any((A.is_required for A in B))",
            "True",
        ),
        (
            "a forced argument cannot be left out behind a text",
            "AnswerGrammar._members_and_end",
            "A.append(f'named_{B}_{C + 1}')",
            "pass",
        ),
        (
            "a forced text has the first closing tag at its end",
            "AnswerGrammar._ending",
            "not any(map(_is_free, members_of(A)))",
            "True",
        ),
    ),
    *rewrites_of(
        "src/text/tool_calls/typed_values.py",
        ("tests/text/test_tool_call_syntaxes.py",),
        (
            "a value that is nullable is never null",
            "_SchemaReader.kinds",
            "A |= {'null'}",
            "pass",
        ),
    ),
    *rewrites_of(
        "src/http/chat/foreign.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "an image in a block of a new type is left out unsaid",
            "_texts",
            "A is None or not B",
            "A is None",
        ),
        (
            "an address of bytes is told as text",
            "_texts",
            "A in B and (A != 'source' or isinstance(B[A], str))",
            "A in B",
        ),
        (
            "a deep block ends the request in a traceback",
            "_texts",
            "A > _MAX_DEPTH",
            "False",
        ),
        (
            "a drawing that failed is told as an image",
            "result_of",
            "[{'type': 'image'} for A in B]",
            "[{'type': 'image'}]",
        ),
        (
            "a result names no call",
            "result_of",
            "A.type in _RESULTS and A.type != 'tool_search_output'",
            "False",
        ),
    ),
    *rewrites_of(
        "src/http/messages/translation.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "a result within an answer stands before its call",
            "_AssistantReader._result",
            "if self._texts or self._thoughts or self._calls:\n    self._end_message()",
            "",
        ),
        (
            "a result of a tool is told as text where it belongs to nobody",
            "_text",
            "'tool_result'",
            "'no_result'",
        ),
    ),
    *rewrites_of(
        "src/http/responses/translation.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "pictures in results are refused like a user's",
            "_ItemReader.__init__",
            "A != 'none'",
            "A == 'all'",
        ),
    ),
    *rewrites_of(
        "src/http/responses/inputs.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "an item of another tool is listed as a reference",
            "_kept",
            "A in (None, 'item_reference')",
            "A not in _PREFIXES",
        ),
    ),
)
