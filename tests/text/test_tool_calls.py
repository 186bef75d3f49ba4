from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.text.answer import Answer, ToolCallBegin
from src.text.tool_calls.calls import MAX_CALLS
from src.text.tool_calls.json_values import MAX_DEPTH, is_object
from src.text.tool_calls.parser import ToolCallParser
from src.text.tool_calls.syntaxes import SYNTAXES
from tests.text.answers import Read, cut, read, read_in_pieces

NAMES = ("add", "get_weather", "a.b-c")


def parser(syntax: str, *, parallel: bool = True, eager: bool = False) -> ToolCallParser:
    return ToolCallParser(SYNTAXES[syntax], NAMES, parallel=parallel, eager=eager)


# Texts that come close to calls, and calls that come close to text.
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|python_start|>", "<|python_end|>", "```json", "```", "<tool_call", "</tool_call"),
    *('{"name": "add", "arguments": {"a": 1}}', '{"name": "get_weather", "parameters": {}}'),
    *('[{"name": "add", "arguments": {}}, ', '{"name": "nobody", "arguments": {}}'),
    *('add(a=1, b="x")', "get_weather(", 'add[ARGS]{"a": "\\u00e9"}', 'add{"a": [1, {"b": null}]}'),
    *('{"arguments": "{\\"a\\": 1}", "name": "add"}', '"arguments": {"a": "<tool_call>"'),
    *("{", "}", "[", "]", "(", ")", ",", ";", ":", '"', "\\", "'", "\n", " ", "=", "add"),
    *("{}", "{ }", "[]", "{}```json\n", '```json\n{"name": "add", "arguments": {}}\n```', "[add("),
    *("true", "-1.5e3", "01", "é", "漢", "text ", "\x00", '"name"', '"name": "add"'),
)


def texts(syntax: str) -> st.SearchStrategy[str]:
    """Texts of these, of the syntax's own tags, and of pieces of a call in it."""
    its = SYNTAXES[syntax]
    pieces = [*its.tags, its.example, its.example[:-9], its.example[7:], *its.example.split("a")]
    fragments = [*FRAGMENTS, *(piece for piece in pieces if piece)]
    piece = st.one_of(st.sampled_from(fragments), st.sampled_from(pieces), st.text(max_size=3))
    return st.lists(piece, max_size=14).map("".join)


ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-(10**20), 10**20),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=8),
            st.sampled_from(["<tool_call>", "</tool_call>", '}"}', "[TOOL_CALLS]", "\\", "```"]),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(data=st.data(), eager=st.booleans(), places=CUTS)
def test_where_the_text_is_cut_makes_no_difference(
    syntax: str, data: st.DataObject, eager: bool, places: list[int]
) -> None:
    text = data.draw(texts(syntax))
    whole = read(parser(syntax, eager=eager), text)
    assert read_in_pieces(parser(syntax, eager=eager), cut(text, places)) == whole
    assert read_in_pieces(parser(syntax, eager=eager), text) == whole


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("empty", ["{}", "{ \n}", "[]", "[ ]", "[{}]", "{};", "[add", "[add("])
def test_what_is_empty_is_read_alike_however_the_text_is_cut(syntax: str, empty: str) -> None:
    """Where a piece ends behind a bracket it is not known yet whether a call begins."""
    its = SYNTAXES[syntax]
    call = '{"name": "add", "arguments": {}}'
    for text in (f"{empty}```json\n{call}\n```", f"{empty}{its.example}", f"{empty}{call}"):
        assert read_in_pieces(parser(syntax), text) == read(parser(syntax), text)


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(data=st.data())
def test_a_call_is_shown_when_it_is_whole_and_text_is_never_lost(
    syntax: str, data: st.DataObject
) -> None:
    def check(answer: Answer) -> None:
        for call in answer.tool_calls:
            assert call.name in NAMES
            assert type(json.loads(call.arguments)) is dict
        assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)

    text = data.draw(texts(syntax))
    result = read_in_pieces(parser(syntax), text, check)
    if not result.calls:
        assert result.content == text


def spelt(syntax: str, calls: list[tuple[str, dict[str, object]]], *, ascii_only: bool) -> str:
    """Calls as a model of the family writes them."""
    key = "parameters" if syntax == "llama3_json" else "arguments"
    texts = [json.dumps({"name": n, key: a}, ensure_ascii=ascii_only) for n, a in calls]
    match syntax:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
        case "llama3_json":
            return "<|python_tag|>" + "; ".join(texts)
        case "mistral":
            return "[TOOL_CALLS] [" + ", ".join(texts) + "]"
        case _:
            return "```json\n[" + ",\n".join(texts) + "]\n```"


@pytest.mark.parametrize("syntax", ["hermes", "llama3_json", "mistral", "json"])
@given(calls=CALLS, ascii_only=st.booleans(), places=CUTS)
def test_calls_as_the_family_writes_them_are_read(
    syntax: str, calls: list[tuple[str, dict[str, object]]], ascii_only: bool, places: list[int]
) -> None:
    text = spelt(syntax, calls, ascii_only=ascii_only)
    for eager in (False, True):
        result = read_in_pieces(parser(syntax, eager=eager), cut(text, places))
        assert [(name, json.loads(text)) for name, text in result.calls] == calls
        assert result.content == ""


LITERALS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(st.sampled_from(["a", "b_1", "city"]), LITERALS, max_size=3),
        ),
        min_size=1,
        max_size=3,
    ),
    tagged=st.booleans(),
    places=CUTS,
)
def test_calls_written_as_python_are_read(
    calls: list[tuple[str, dict[str, object]]], tagged: bool, places: list[int]
) -> None:
    def one(name: str, arguments: dict[str, object]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    text = "[" + ", ".join(one(*call) for call in calls) + "]"
    if tagged:
        text = f"<|python_start|>{text}<|python_end|>"
    result = read_in_pieces(parser("pythonic"), cut(text, places))
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == calls
    assert result.content == ""


ADD = '{"name": "add", "arguments": {"a": 1}}'
CALL = ("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        # text before, between and after; white space next to calls is no text
        (
            "hermes",
            f"One.\n<tool_call>{ADD}</tool_call>\n two <tool_call>\n{ADD}\n</tool_call>\n",
            Read("One.\ntwo ", [CALL, CALL]),
        ),
        # the closing tag may be missing at the end, or altogether
        ("hermes", f"<tool_call>{ADD}", Read("", [CALL])),
        ("hermes", f"<tool_call>{ADD}<tool_call>{ADD}</tool_call>", Read("", [CALL, CALL])),
        # arguments are what the model wrote, to the last space; in any order; or none at all
        ("hermes", '<tool_call>{"arguments":{"a": 1} , "name":"add"}', Read("", [CALL])),
        ("hermes", '<tool_call>{"name":"add","arguments":{ }}', Read("", [("add", "{ }")])),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', Read("", [("add", "{}")])),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}', Read("", [("add", "{}")])),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', Read("", [CALL])),
        ("hermes", f'<tool_call>{{"type": "function", "id": "1", {ADD[1:]}', Read("", [CALL])),
        # no calls: nobody of that name, twice the name, no object, a raw line break, a lone half
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}', None),
        ("hermes", f'<tool_call>{{"name": "add", {ADD[1:]}', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\n"}}', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 01}}', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}', None),
        ("hermes", '<tool_call>{"name": "add", "other": 1, "arguments": {}}', None),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', None),
        ("hermes", '<tool_call>{"name": "add", "argum', None),
        ("hermes", "a <tool_call> is a tag", None),
        ("hermes", "what begins with <tool_ca", None),
        ("hermes", ADD, None),
        ("hermes", " \n", None),
        # a call in what turned out to be none is found
        ("hermes", f"<tool_call>no <tool_call>{ADD}", Read("<tool_call>no ", [CALL])),
        ("hermes", f'<tool_call>{{"name": <tool_call>{ADD}', Read('<tool_call>{"name": ', [CALL])),
        # without a tag, wherever it stands
        ("llama3_json", ADD.replace("arguments", "parameters"), Read("", [CALL])),
        ("llama3_json", f"\n{ADD}; {ADD}\n{ADD}", Read("", [CALL, CALL, CALL])),
        ("llama3_json", f"{ADD} is what I call", Read("is what I call", [CALL])),
        ("llama3_json", f"I call {ADD}", Read("I call ", [CALL])),
        ("llama3_json", f"{ADD}, and so on", Read(", and so on", [CALL])),
        ("llama3_json", f"I call <|python_tag|>{ADD}", Read("I call ", [CALL])),
        ("llama3_json", '{"name": "add"}', Read("", [("add", "{}")])),
        # an object in another that is no call is none either
        ("llama3_json", f'{{"name": "nobody", "arguments": {ADD}}}', None),
        ("llama3_json", f'{{"x": [{ADD}], "name": "add"}}', None),
        ("llama3_json", '{"name": "Ada", "age": 36}', None),
        ("llama3_json", '<|python_tag|>print("hi")', None),
        ("json", f"[{ADD},\n{ADD}]", Read("", [CALL, CALL])),
        ("json", f"```\n{ADD}\n```\n", Read("", [CALL])),
        ("json", f"<tool_call>\n{ADD}\n</tool_call>", Read("", [CALL])),
        ("json", f"So:\n```json\n{ADD}\n```", Read("So:\n", [CALL])),
        ("json", '```json\n{"a": 1}\n```', None),
        ("json", f'```json\n{{"a": {ADD}}}\n```', None),
        ("json", "[1, 2]", None),
        ("mistral", f"[TOOL_CALLS][{ADD}]", Read("", [CALL])),
        ("mistral", 'Well.[TOOL_CALLS]add[ARGS]{"a": 1}', Read("Well.", [CALL])),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}', Read("", [CALL])),
        ("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 1}', Read("", [CALL, CALL])),
        ("mistral", "[TOOL_CALLS]nobody{}", None),
        ("pythonic", "[add(a=1), add(a=1)]", Read("", [CALL, CALL])),
        ("pythonic", r"[add(a='\u00e9\'\d')]", Read("", [("add", '{"a": "é\'\\\\d"}')])),
        ("pythonic", r"[add(a='\ud83d\ude00')]", Read("", [("add", '{"a": "😀"}')])),
        ("pythonic", r"[add(a='\ud83d')]", None),
        ("pythonic", "So: [add(a=1)]", Read("So: ", [CALL])),
        ("pythonic", "[add()]", Read("", [("add", "{}")])),
        ("pythonic", "[add(1)]", None),
        ("pythonic", "[add(a=1, a=2)]", None),
        ("pythonic", "[add(a=open('x'))]", None),
        ("pythonic", "[nobody(a=1)]", None),
        ("pythonic", "[add(a=1e308)]", Read("", [("add", '{"a": 1e+308}')])),
        ("pythonic", "[add(a=1e999)]", None),
        ("pythonic", "[add(a={'b': [-1e999]})]", None),
        ("pythonic", "[1, 2, 3]", None),
    ],
)  # fmt: skip
def test_what_is_a_call_and_what_is_text(syntax: str, text: str, expected: Read | None) -> None:
    """``None``: all of it is text."""
    expected = Read(text, []) if expected is None else expected
    assert read(parser(syntax), text) == expected
    assert read_in_pieces(parser(syntax), text) == expected


def test_arguments_come_as_they_are_written_where_that_is_safe() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "one two"}}</tool_call>'
    shown: list[str] = []
    read_in_pieces(
        parser("hermes", eager=True),
        text,
        lambda answer: shown.extend(call.arguments for call in answer.tool_calls),
    )
    # The name comes before all of them.
    assert len(set(shown)) == 1 + len('{"a": "one two"}')
    cut_short = read(parser("hermes", eager=True), text[:51])
    assert cut_short == Read("", [("add", '{"a": "one ')])


def test_what_is_wrong_after_a_call_has_been_shown_ends_it() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}} and on'
    assert read(parser("hermes", eager=True), text) == Read("}} and on", [("add", '{"a": oops')])


@pytest.mark.parametrize("eager", [False, True])
def test_calls_after_the_first_are_dropped_where_they_may_not_be_parallel(eager: bool) -> None:
    text = f"<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call> and text"
    result = read(parser("hermes", parallel=False, eager=eager), text)
    assert result == Read("and text", [CALL])


def test_calls_are_bounded_in_number_and_depth() -> None:
    many = f"<tool_call>{ADD}</tool_call>" * (MAX_CALLS + 2)
    result = read(parser("hermes"), many)
    assert len(result.calls) == MAX_CALLS
    assert result.content == f"<tool_call>{ADD}</tool_call>" * 2
    for depth, calls in ((MAX_DEPTH - 1, 1), (MAX_DEPTH, 0), (100_000, 0)):
        nested = '{"a": ' + "[" * depth + "]" * depth + "}"
        text = '<tool_call>{"name": "add", "arguments": ' + nested + "}"
        assert len(read(parser("hermes"), text).calls) == calls
        literal = f"[add(a={'[' * depth}{']' * depth})]"
        assert len(read(parser("pythonic"), literal).calls) == 0


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize(
    "repeated",
    ["<tool_call>", '<tool_call>{"name": "', "[", "```json\n{", "[add(a='", '{"a":', '{"', "[a("],
)
def test_work_is_linear_in_the_text(syntax: str, repeated: str) -> None:
    text = repeated * (40_000 // len(repeated))
    started = time.process_time()
    result = read_in_pieces(parser(syntax), cut(text, range(0, len(text), 4)))
    # It takes some tenths of a second; a square of 40,000 would take many minutes.
    assert time.process_time() - started < 10
    assert result.content == text


@pytest.mark.parametrize(("syntax", "length"), [("hermes", 29), ("mistral", 9)])
def test_ids_are_as_the_family_takes_them(syntax: str, length: int) -> None:
    (tag,) = SYNTAXES[syntax].openings
    events = parser(syntax).feed(f"{tag}[{ADD}]" if syntax == "mistral" else f"{tag}{ADD}")
    (begin,) = (event for event in events if isinstance(event, ToolCallBegin))
    assert len(begin.id) == length
    assert begin.id.replace("_", "").isalnum()


@given(
    st.one_of(
        st.text(max_size=12), ARGUMENTS.map(json.dumps), st.sampled_from(["{}", "{} ", "{1}"])
    )
)
def test_an_object_is_what_json_reads_as_one(text: str) -> None:
    def is_constant(name: str) -> None:
        raise ValueError(name)

    try:
        expected = type(json.loads(text, parse_constant=is_constant)) is dict
    except ValueError:
        expected = False
    # White space around it is for the caller to remove.
    assert is_object(text) == (expected and text == text.strip())
