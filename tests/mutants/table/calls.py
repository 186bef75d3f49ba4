"""Of calls of tools: where values between tags end, and what other servers' calls become."""

from tests.mutants.mutation import mutations_of

_VALUES = ("tests/text/test_values_between_tags.py",)

MUTATIONS = (
    *mutations_of(
        "src/text/tool_calls/value_ends.py",
        _VALUES,
        (
            "a value ends at a closing tag with any text behind it",
            "        return bool(found) or source.ends_within(expected)\n\n"
            "    def _is_closed_before_argument(",
            "        return True\n\n    def _is_closed_before_argument(",
        ),
        (
            "a line that is a tag which closes the call ends the value that goes on behind it",
            "        return bool(begins_line and is_whole) and not (yield from self._goes_on())\n",
            "        return bool(begins_line and is_whole)\n",
        ),
        (
            "a tag of calls behind one that closes the call ends the value without a call",
            "        if opener and (yield from self._has_call(tags.openers.index(opener))):\n",
            "        if opener:\n",
        ),
        (
            "text behind a call without the value's closing tag is a part of the value",
            "        return source.is_cut_short\n\n    def _is_argument",
            "        return True\n\n    def _is_argument",
        ),
        (
            "a value that goes on for long behind a tag that closes the call ends there",
            "        if source.looked_ahead >= MAX_AHEAD:\n",
            "        if False:\n",
        ),
        (
            "a call behind a long text is a part of the value of the call before it",
            "            self._is_in_doubt = True\n            return True\n",
            "            return True\n",
        ),
        (
            "a value that is cut short behind a tag that closes the call is whole",
            "        return source.is_cut_short\n\n    def _is_argument",
            "        return False\n\n    def _is_argument",
        ),
        (
            "the next call's closing tag is taken for that of a value before it",
            "            elif (yield from self._is_call(tags.openers.index(tag))):\n"
            "                return False\n",
            "",
        ),
        (
            "any closing tag in the text behind a call shows that its value goes on",
            "                if (yield from self._is_closed()):\n                    return True\n",
            "                return True\n",
        ),
        (
            "a function that is closed twice is a part of the value",
            "tags.closers[tags.closers.index(found) :]",
            "tags.closers[tags.closers.index(found) + 1 :]",
        ),
        (
            "a function that XML closes is the end of the call",
            "        if found in tags.closers[1:-1] and self._is_wrapped:\n",
            "        if False:\n",
        ),
        (
            "a closing tag that is left out before the next argument is missed",
            "            if begins_line or not tags.on_lines:\n",
            "            if not tags.on_lines:\n",
        ),
        (
            "an argument in the middle of a line ends the value before it",
            "            if begins_line or not tags.on_lines:\n",
            "            if True:\n",
        ),
        (
            "the arguments of a quoted call end the value that quotes it",
            "        elif tag == tags.argument and not is_in_call:\n",
            "        elif tag == tags.argument:\n",
        ),
        (
            "a quoted call is not seen to be one",
            "                quoted[level] += 1\n",
            "                quoted[level] += 0\n",
        ),
        (
            "a tag that a text names hides the arguments behind it",
            "            if is_call and level == 1:\n",
            "            if level == 1:\n",
        ),
        (
            "arguments behind a quoted call that stays open are a part of the value",
            "                return not (self._is_in_doubt and self._open_calls)\n",
            "                return True\n",
        ),
        (
            "text behind the closing tag of an argument made up is a part of it",
            "            if tag == tags.closer and self._is_made_up and not self._quoted[0]:\n",
            "            if False:\n",
        ),
        (
            "a name between tags in a line ends the value before it",
            "        if begins_line or tags.on_lines:\n",
            "        if True:\n",
        ),
        (
            "a value that quotes the beginning of a call has no end",
            "            return not source.is_cut_short\n",
            "            return False\n",
        ),
        (
            "an answer that is cut short ends a value",
            "            return not source.is_cut_short\n",
            "            return True\n",
        ),
        (
            "without the closing tags of one call the next one is a part of its value",
            "        if opener and (yield from self._has_call(tags.openers.index(opener))):\n"
            "            return True\n",
            "",
        ),
        (
            "a value ends with a tag of the call within a line",
            "        return bool(begins_line and is_whole) and",
            "        return bool(is_whole) and",
        ),
        (
            "a list of functions in a value ends the call",
            "        is_whole = found or level + 1 == len(tags.closers) or not self._is_wrapped\n",
            "        is_whole = True\n",
        ),
        (
            "under a grammar a value ends where a tag is left out",
            "self._is_exact else tags.all",
            "False else tags.all",
        ),
        (
            "under a grammar the function's end is taken for the call's",
            "        for closer in tags.closers[2:] if found == tags.closers[1] else ():\n",
            "        for closer in ():\n",
        ),
    ),
    *mutations_of(
        "src/text/tool_calls/member_calls.py",
        _VALUES,
        (
            "an argument's value ends at an argument that was given before",
            "        return bool(key) and key not in self._keys and (",
            "        return bool(key) and (",
        ),
        (
            "the line break before a tag of the next argument is a part of the value",
            "        return self._tags.on_lines or not self._is_closed\n",
            "        return self._tags.on_lines\n",
        ),
        (
            "a last line break of a value is lost",
            "            calls.argue(quoted_inside(text.held))\n",
            "            pass\n",
        ),
        (
            "a call without its function's closing tag is text",
            "    if (yield from source.ahead(source.starts_with_any(others))):\n",
            "    if False:\n",
        ),
        (
            "a value without its opening tag is no value",
            '        yield from source.starts_with("<arg_value>")\n',
            '        yield from source.expect("<arg_value>")\n',
        ),
    ),
    *mutations_of(
        "src/text/source.py",
        _VALUES,
        (
            "what was looked at ahead is lost where the text is cut there",
            "        kept = self._at if self._mark is None else self._mark\n",
            "        kept = self._at\n",
        ),
        (
            "a look ahead takes white space without an end",
            "            match = pattern.match(self._buffer, self._at, self._at + limit)\n",
            "            match = pattern.match(self._buffer, self._at)\n",
        ),
        (
            "a tag behind the last character of a look ahead is seen where it has come already",
            "            if end == certain and limit > 0 and (found",
            "            if end == certain and (found",
        ),
    ),
    *mutations_of(
        "src/text/answer_grammar.py",
        (*_VALUES, "tests/text/test_forced_calls.py"),
        (
            "a forced text may go on behind the tag of an argument",
            'self._rule(f"{name}[lazy]", f"/(.|\\\\n)*{end}/ & {without}")',
            'self._rule(f"{name}[lazy]", f"/(.|\\\\n)*{end}/")',
        ),
        (
            "a forced call ends without an argument that is required",
            "                if not any(one.is_required for one in later):\n",
            "                if True:\n",
        ),
        (
            "a forced argument cannot be left out behind a text",
            '                    named.append(f"named_{name}_{index + 1}")\n',
            "                    pass\n",
        ),
        (
            "a forced text has the first closing tag at its end",
            "        if not any(map(_is_free, members_of(schema))):\n",
            "        if True:\n",
        ),
    ),
    *mutations_of(
        "src/text/tool_calls/typed_values.py",
        ("tests/text/test_tool_call_syntaxes.py",),
        (
            "a value that is nullable is never null",
            '            found |= {"null"}\n',
            "            pass\n",
        ),
    ),
    *mutations_of(
        "src/http/chat/foreign.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "an image in a block of a new type is left out unsaid",
            "            if text is None or not replaces_media:\n",
            "            if text is None:\n",
        ),
        (
            "an address of bytes is told as text",
            '            if key in value and (key != "source" or isinstance(value[key], str)):\n',
            "            if key in value:\n",
        ),
        (
            "a deep block ends the request in a traceback",
            "    if depth > _MAX_DEPTH:\n",
            "    if False:\n",
        ),
        (
            "a drawing that failed is told as an image",
            '        held = [{"type": "image"} for _ in held]\n',
            '        held = [{"type": "image"}]\n',
        ),
        (
            "a result names no call",
            '    if read.type in _RESULTS and read.type != "tool_search_output":\n',
            "    if False:\n",
        ),
    ),
    *mutations_of(
        "src/http/messages/translation.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "a result within an answer stands before its call",
            "        if self._texts or self._thoughts or self._calls:\n"
            "            self._end_message()\n        text",
            "        text",
        ),
        (
            "a result of a tool is told as text where it belongs to nobody",
            '    elif kind == "tool_result":\n',
            '    elif kind == "no_result":\n',
        ),
    ),
    *mutations_of(
        "src/http/responses/translation.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "pictures in results are refused like a user's",
            '        self._replaces_results = media != "none"\n',
            '        self._replaces_results = media == "all"\n',
        ),
    ),
    *mutations_of(
        "src/http/responses/inputs.py",
        ("tests/http/chat/test_foreign.py",),
        (
            "an item of another tool is listed as a reference",
            '    if kind in (None, "item_reference"):\n',
            "    if kind not in _PREFIXES:\n",
        ),
    ),
)
