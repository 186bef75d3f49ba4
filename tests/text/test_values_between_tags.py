"""Where a value between tags ends: with such tags in it, and with closing tags left out.

The texts are what coding agents write: files with code, XML, HTML, and texts about tool calls.
"""

from __future__ import annotations

import functools
import json
import re
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from src.text.answer import ToolCallArguments, whole_answer
from src.text.tool_calls.parser import ToolCallParser
from src.text.tool_calls.syntaxes import SYNTAXES
from src.text.tool_calls.typed_values import kinds_of_arguments
from src.text.tool_calls.value_ends import MAX_AHEAD
from tests.support.slowness import slowness
from tests.text.answers import Read, cut, read, read_in_pieces
from tests.text.test_answer_plan import conforms, tool
from tests.text.test_forced_calls import plan, tokenizer

TEXT = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "write": {"properties": {"path": TEXT, "content": TEXT, "mode": {"type": "integer"}}},
    "edit": {"properties": {"path": TEXT, "edits": {"type": "array"}, "why": {}}},
    "bash": {"properties": {"command": TEXT}},
    "now": {},
}
KINDS = {name: kinds_of_arguments(parameters) for name, parameters in TOOLS.items()}


def parser(syntax: str, **how: bool) -> ToolCallParser:
    return ToolCallParser(SYNTAXES[syntax], KINDS, **how)


def qwen(name: str, **arguments: str) -> str:
    """A call as the chat template of Qwen3-Coder shows it."""
    spelt = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{spelt}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    """A call as the chat template of GLM-4.7 shows it; that of 4.5 has line breaks between tags."""
    spelt = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{spelt}</tool_call>"


def glm_on_lines(name: str, **arguments: str) -> str:
    spelt = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{spelt}\n</tool_call>"


def glm_of_grammar(name: str, **arguments: str) -> str:
    """A call as it is forced."""
    spelt = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{spelt}</tool_call>"


WRITERS = {"qwen3_coder": [qwen], "glm45": [glm, glm_on_lines]}

# Contents of files, none of which ends the value that it is.
QUOTED = [
    "The value ends with </parameter>, or with </arg_value>.",
    "</parameter>",
    "</arg_value> first",
    "last </parameter>",
    "def close(text):\n    return text.split('</parameter>')[0] + \"</function>\"\n",
    "assert parse('<parameter=path>\\nx\\n</parameter>\\n</function>\\n</tool_call>')",
    "<ul>\n  <li>Write <code>&lt;parameter=x&gt;</code>, then </parameter>.</li>\n</ul>",
    '<function name="f">\n  <parameter>x</parameter>\n</function>\n<function name="g"/>',
    "<functions>\n<function>\n<parameter>\nx\n</parameter>\n</function>\n</functions>",
    "<do>\n  <parameter name='a'>1</parameter>\n  <parameter name='b'>2</parameter>\n</do>",
    "a line of </tool_call> and one of <tool_call>\nand </function> and <function=name>.",
    "Tags:\n- <parameter=path>\n- </parameter>\n- <arg_key>path\n- <tool_call>\n",
    "Set <parameter=mode>, and <parameter=x> too.",
    "It has had\n<parameter=path>\nand\n<arg_key>path</arg_key>\nbefore.",
    "    </parameter>\n    </function> of something else",
    "\nfirst and last line are empty\n",
    "   indented\n\t\n",
    "",
    "\n",
    "\r\n<\r\n",
    "<",
    "</",
    "</parameter",
    "if a < b and c </ d: <parameter",
    '{"json": "</parameter>", "list": ["</arg_value>"]}',
    "```xml\n<arg_key>of no call\n</arg_value>\n```",
    "日本語 </parameter> 😀",
    "A call begins with <tool_call>, a value with <arg_value>.",
    "Name <arg_key>mode</arg_key> between tags.",
    # Lines that are a closing tag, and more of the file behind them.
    "A call ends with\n</tool_call>\nand nothing else.",
    "</tool_call>\nis a line",
    "first\n</function>\n</tool_call>\nlast",
    "first\n</function>\nlast",
    "</tool_call>\n",
    "a\n</tool_call>\n<tool_call>\nare tags, and so is\n</tool_call>\n",
    "a\n</tool_call>\n" + "A long text follows. " * 60 + "\nSee </parameter> and </arg_value>.",
    "a\n</tool_call>\nsee </parameter> and </arg_value>, and then\n</tool_call>\nthe end",
]
# Calls within a file, whole, as a text about tools or a test of a parser has them.
CALL_TEXTS = [
    qwen("write", path="b.md", content="inner"),
    qwen("search", query="a"),
    qwen("search", query="a") + "\n",
    "Write it so:\n\n" + qwen("bash", command="ls") + "\n\nand wait for the result.\n",
    "Two:\n" + qwen("bash", command="ls") + "\n" + qwen("bash", command="pwd") + "\nof them",
    "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\nwithout the rest",
    "One line: <function=f><parameter=x>1</parameter></function> is a call.",
    qwen("bash", command="ls").replace("\n", "\n    "),
    "No arguments: " + qwen("now") + "!",
    "```\n<tool_call>\n<function=f>\n<parameter=x>\n...\n```\nis cut off",
]
GLM_CALL_TEXTS = [
    glm("write", path="b.md", content="inner"),
    glm_on_lines("search", query="a") + "\n",
    "Write " + glm("bash", command="ls") + " and wait.",
    glm("bash", command="ls") + "\n" + glm("bash", command="pwd") + "\nof them",
    "No arguments: " + glm("now") + "!",
]
CASES = [
    (syntax, writer, content)
    for syntax, writers in WRITERS.items()
    for writer in writers
    for content in (
        *QUOTED,
        *(CALL_TEXTS if syntax == "qwen3_coder" else GLM_CALL_TEXTS),
    )
]


def check(syntax: str, text: str, expected: list[tuple[str, dict[str, Any]]], content: str) -> None:
    """The text is these calls, whole, in pieces, and cut at every place; shown late or early."""
    whole = read(parser(syntax), text)
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == expected
    assert whole.content == content
    for eager in (False, True):
        assert read_in_pieces(parser(syntax, eager=eager), text) == whole
    for place in range(len(text) + 1):
        assert read_in_pieces(parser(syntax, eager=True), cut(text, [place])) == whole


@pytest.mark.parametrize(("syntax", "writer", "content"), CASES)
def test_a_value_may_hold_the_tags_of_calls(syntax: str, writer: Any, content: str) -> None:
    text = "I write it.\n" + writer("write", path="a.md", content=content)
    expected = ("write", {"path": "a.md", "content": content})
    check(syntax, text, [expected], "I write it.\n")


@pytest.mark.parametrize(("syntax", "writer", "content"), CASES)
def test_more_may_follow_a_value_with_tags(syntax: str, writer: Any, content: str) -> None:
    if content.endswith("is cut off"):
        # What is open in such a value is closed by what follows, unless that ends the answer.
        return
    text = writer("write", path="a.md", content=content, mode="420")
    text += "\n" + writer("bash", command="cat a.md")
    expected = [
        ("write", {"path": "a.md", "content": content, "mode": 420}),
        ("bash", {"command": "cat a.md"}),
    ]
    for eager in (False, True):
        for pieces in ([text], list(text)):
            result = read_in_pieces(parser(syntax, eager=eager), pieces)
            calls = [(name, json.loads(arguments)) for name, arguments in result.calls]
            assert (calls, result.content) == (expected, "")


A_FILE = ("write", {"path": "a.md", "content": "hello"})
LS = ("bash", {"command": "ls"})
Q_FILE = qwen("write", path="a.md", content="hello")
Q_LS = qwen("bash", command="ls")
G_FILE = glm_on_lines("write", path="a.md", content="hello")
G47_FILE = glm("write", path="a.md", content="hello")
G_LS = glm("bash", command="ls")
MADE_UP = ("write", {"path": "a.md", "made_up": "hello"})
LEFT_OUT: list[tuple[str, str, str, list[Any], str]] = [
    ("before the next", "qwen3_coder", Q_FILE.replace("\n</parameter>", "", 1), [A_FILE], ""),
    ("all of them", "qwen3_coder", Q_FILE.replace("\n</parameter>", ""), [A_FILE], ""),
    ("before the end", "qwen3_coder", Q_LS.replace("</parameter>\n", ""), [LS], ""),
    ("and text", "qwen3_coder", Q_LS.replace("</parameter>\n", "") + "\nSo.", [LS], "So."),
    ("of the function", "qwen3_coder", Q_FILE.replace("</function>\n", ""), [A_FILE], ""),
    (
        "of the function, and two",
        "qwen3_coder",
        f"{Q_FILE}\n{Q_LS}".replace("</function>\n", ""),
        [A_FILE, LS],
        "",
    ),
    ("of the call", "qwen3_coder", Q_FILE.replace("\n</tool_call>", ""), [A_FILE], ""),
    (
        "of the call, and two",
        "qwen3_coder",
        f"{Q_FILE}\n{Q_LS}".replace("\n</tool_call>", ""),
        [A_FILE, LS],
        "",
    ),
    (
        "of function and call",
        "qwen3_coder",
        f"{Q_FILE}\n{Q_LS}".replace("</function>\n</tool_call>", ""),
        [A_FILE, LS],
        "",
    ),
    (
        "of value and function",
        "qwen3_coder",
        Q_LS.replace("</parameter>\n</function>\n", ""),
        [LS],
        "",
    ),
    (
        "of value and function, and two",
        "qwen3_coder",
        f"{Q_LS}\n{Q_FILE}".replace("</parameter>\n</function>\n", ""),
        [LS, A_FILE],
        "",
    ),
    (
        "of value and call",
        "qwen3_coder",
        Q_LS.replace("</parameter>\n", "").replace("\n</tool_call>", ""),
        [LS],
        "",
    ),
    (
        "nothing, and the function closed twice",
        "qwen3_coder",
        Q_LS.replace("</function>", "</function>\n</function>"),
        [LS],
        "</function>\n</tool_call>",
    ),
    ("the opening", "qwen3_coder", Q_FILE.removeprefix("<tool_call>\n"), [A_FILE], ""),
    (
        "the opening, with text behind",
        "qwen3_coder",
        Q_LS.removeprefix("<tool_call>\n").replace("</parameter>\n", "")[:-12] + "Done.",
        [LS],
        "Done.",
    ),
    ("line breaks", "qwen3_coder", Q_FILE.replace("\n", ""), [A_FILE], ""),
    (
        "line breaks and value",
        "qwen3_coder",
        Q_LS.replace("\n", "").replace("</parameter>", ""),
        [LS],
        "",
    ),
    ("two", "qwen3_coder", f"{Q_FILE}{Q_LS}", [A_FILE, LS], ""),
    (
        "of value, and text before the next",
        "qwen3_coder",
        f"{Q_LS}\nNow I write.\n{Q_FILE}".replace("</parameter>\n", "", 1),
        [LS, A_FILE],
        "Now I write.\n",
    ),
    (
        "of value, and text with a tag",
        "qwen3_coder",
        Q_LS.replace("</parameter>\n", "") + "\nIt has no </parameter> tag.",
        [LS],
        "It has no </parameter> tag.",
    ),
    (
        "of value, and text before the next",
        "glm45",
        f"{G_FILE}\nNow <tool_call> it.\n{G_LS}".replace("</arg_value>", ""),
        [A_FILE, LS],
        "Now <tool_call> it.\n",
    ),
    ("a name made up", "qwen3_coder", Q_FILE.replace("content", "made_up"), [MADE_UP], ""),
    (
        "before a name made up",
        "qwen3_coder",
        Q_FILE.replace("content", "made_up").replace("\n</parameter>", "", 1),
        [MADE_UP],
        "",
    ),
    (
        "an empty value",
        "qwen3_coder",
        qwen("write", path="", content="x").replace("\n\n</parameter>", "", 1),
        [("write", {"path": "", "content": "x"})],
        "",
    ),
    ("no arguments", "qwen3_coder", qwen("now").replace("</function>\n", ""), [("now", {})], ""),
    ("before the next", "glm45", G_FILE.replace("</arg_value>", "", 1), [A_FILE], ""),
    ("before the next", "glm45", G47_FILE.replace("</arg_value>", "", 1), [A_FILE], ""),
    ("all of them", "glm45", G_FILE.replace("</arg_value>", ""), [A_FILE], ""),
    ("all of them", "glm45", G47_FILE.replace("</arg_value>", ""), [A_FILE], ""),
    ("and text", "glm45", G_FILE.replace("</arg_value>", "") + "\nSo.", [A_FILE], "So."),
    ("and two", "glm45", f"{G47_FILE}{G_LS}".replace("</arg_value>", ""), [A_FILE, LS], ""),
    ("of the call, and two", "glm45", f"{G_FILE}\n{G_LS}".replace("</tool_call>", ""),
     [A_FILE, LS], ""),
    ("before a value", "glm45", G47_FILE.replace("<arg_value>", ""), [A_FILE], ""),
    (
        "before a name made up",
        "glm45",
        G_FILE.replace("content", "made_up").replace("</arg_value>", "", 1),
        [MADE_UP],
        "",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("syntax", "text", "expected", "content"),
    [pytest.param(*case, id=f"{case[0]}-{what}") for what, *case in LEFT_OUT],
)
def test_tags_may_be_left_out(syntax: str, text: str, expected: Any, content: str) -> None:
    check(syntax, text, expected, content)


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        # A value without any end may be half of one.
        ("qwen3_coder", "<tool_call>\n<function=bash>\n<parameter=command>\nrm -rf /tmp"),
        ("glm45", "<tool_call>bash<arg_key>command</arg_key><arg_value>rm -rf /tmp"),
        # Nor do tags end it that are within a line, or that XML has too.
        ("qwen3_coder", qwen("bash", command="ls </tool_call> it").split("\n</parameter>")[0]),
        ("glm45", glm("bash", command="ls </tool_call> it").split("</arg_value>")[0]),
        ("qwen3_coder", qwen("bash", command="<a>\n</function>\nb").split("\n</parameter>")[0]),
        # An argument that comes twice.
        ("qwen3_coder", qwen("bash", command="a").replace("</f", "<parameter=command>\nb\n</f")),
        ("glm45", glm("bash", command="a").replace("</t", "<arg_key>command</arg_key>b</t")),
    ],
)
def test_what_is_no_call_is_text(syntax: str, text: str) -> None:
    assert read(parser(syntax), text) == Read(text, [])
    assert read_in_pieces(parser(syntax), text) == Read(text, [])
    # Where arguments are shown as they come, the call ends where it goes wrong.
    early = read(parser(syntax, eager=True), text)
    assert len(early.calls) == 1
    assert read_in_pieces(parser(syntax, eager=True), text) == early


SNIPPETS = [
    ("qwen3_coder", qwen, "Write\n<parameter=city>\nParis\n</parameter>\nfor a city."),
    ("qwen3_coder", qwen, "Write\n<parameter=city>\nParis\n</parameter>\n"),
    ("qwen3_coder", qwen, "Write `<function=NAME><parameter=KEY>` first."),
    ("glm45", glm, "Write\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\nfor a city."),
    ("glm45", glm, "Write `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>` first."),
]


@pytest.mark.parametrize(("syntax", "writer", "content"), SNIPPETS)
def test_no_arguments_are_made_of_a_part_of_a_quoted_call(
    syntax: str, writer: Any, content: str
) -> None:
    """What cannot be told from an argument is none of a file's text, and none of the call's."""
    whole = ("write", {"content": content, "path": "a.md"})
    text = writer("write", content=content, path="a.md")
    result = read(parser(syntax), text)
    calls = [(name, json.loads(arguments)) for name, arguments in result.calls]
    assert (calls, result.content) in (([whole], ""), ([], text))
    for size in (1, 5):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read_in_pieces(parser(syntax), pieces) == result


def test_an_answer_that_is_cut_short_has_no_call_by_its_end() -> None:
    """Without the closing tag the value may go on behind the place where it is cut."""
    no_closer = Q_LS.replace("</parameter>\n", "")
    for text in (
        no_closer.replace("\n", ""),
        Q_LS.split("</function>")[0],
        no_closer + "\nand more",
    ):
        reader = parser("qwen3_coder")
        events = reader.feed(text) + reader.finish(cut_short=True)
        assert not any(isinstance(event, ToolCallArguments) for event in events)


@pytest.mark.parametrize("behind", ["", "\nDone."])
@pytest.mark.parametrize("second", [Q_FILE, Q_LS.replace("</parameter>\n", "")])
def test_a_call_behind_a_long_text_is_no_part_of_a_value(second: str, behind: str) -> None:
    """More is not looked at than there is text, so it cannot be told where the value ends."""
    first = Q_LS.replace("</parameter>\n", "")
    text = f"{first}\n{'Now I write. ' * 120}\n{second}{behind}"
    assert read(parser("qwen3_coder"), text) == Read(text, [])
    # Where arguments are shown as they come, those of such a call are never whole.
    early = read(parser("qwen3_coder", eager=True), text)
    assert len(early.calls) == 1
    with pytest.raises(json.JSONDecodeError):
        json.loads(early.calls[0][1])
    for pieces in (text, *(cut(text, [place, place + 3]) for place in range(0, len(text), 41))):
        assert read_in_pieces(parser("qwen3_coder"), pieces) == Read(text, [])
        assert read_in_pieces(parser("qwen3_coder", eager=True), pieces) == early


def test_the_end_of_a_look_ahead_makes_no_difference_to_a_value() -> None:
    """A tag may stand right behind the last character that is looked at."""
    first = Q_LS.replace("</parameter>\n", "")
    for size in range(MAX_AHEAD - 40, MAX_AHEAD + 2):
        text = f"{first}\n{'-' * size}{Q_FILE}"
        whole = read(parser("qwen3_coder"), text)
        assert read_in_pieces(parser("qwen3_coder"), text) == whole
        assert whole.calls == [] or len(whole.calls) == 2


def test_json_between_tags_may_hold_them() -> None:
    edits = [{"old": "</parameter>\n<parameter=why>\n", "new": "</function></tool_call>"}]
    text = qwen("edit", edits=json.dumps(edits), why="None")
    check("qwen3_coder", text, [("edit", {"edits": edits, "why": None})], "")
    text = text.replace("\n</parameter>", "")
    check("qwen3_coder", text, [("edit", {"edits": edits, "why": None})], "")


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("syntax", WRITERS)
def test_a_long_value_is_shown_while_it_is_written(syntax: str, eager: bool) -> None:
    """What is held back is what may yet be a tag, or what a tag would need behind it."""
    line = "x = '</parameter>' + '</arg_value>' + '</function>'\n"
    text = WRITERS[syntax][0]("write", path="a", content=line * 50)
    reader = parser(syntax, eager=eager)
    shown, most = 0, 0
    for place in range(len(text)):
        for event in reader.feed(text[place]):
            shown += len(event.text) if isinstance(event, ToolCallArguments) else 0
        most = max(most, place - shown)
    assert (most < 120) is eager


REPEATED = [
    *("</parameter>\n", "</arg_value>", "</function>\n", "</tool_call>\n", "<tool_call>"),
    *("<function=f>\n<parameter=", "\n<parameter=a", "<arg_key>a", "</parameter>" + " " * 60),
    *("\n</tool_call>\n</parameter>", "<", "\n", "</parameter>\n</function>\n", " "),
]


@pytest.mark.parametrize("syntax", WRITERS)
@pytest.mark.parametrize("repeated", REPEATED)
@pytest.mark.parametrize("step", [1, 40_000])
def test_work_is_linear_in_a_value(syntax: str, repeated: str, step: int) -> None:
    start = WRITERS[syntax][0]("write", path="a", content="b").partition("b")[0]
    text = start + "b" + repeated * (40_000 // len(repeated))
    started = time.thread_time()
    reader = parser(syntax)
    for place in range(0, len(text), step):
        reader.feed(text[place : place + step])
    reader.finish()
    # It takes some tenths of a second; a square of 40,000 would take many minutes.
    assert time.thread_time() - started < 5 * slowness()


FRAGMENTS = st.sampled_from(
    [
        *("</parameter>", "</function>", "</tool_call>", "<tool_call>", "</arg_value>", "\n"),
        *("<parameter=path>", "<parameter=mode>", "<parameter=x>", "<function=f>", "<function="),
        *("<arg_key>path</arg_key>", "<arg_key>mode</arg_key>", "<arg_value>", "<arg_key>", " "),
        *("a", "<", "</", "1", "write", "now", '{"a": "', '"}', "[", Q_LS, G_LS, "\n\n", "<param"),
        *("\n</parameter>\n", "\n</function>\n", "\n</tool_call>\n", "\n<parameter=content>\n"),
    ]
)


@pytest.mark.parametrize("syntax", WRITERS)
@settings(max_examples=60)
@given(
    fragments=st.lists(FRAGMENTS, max_size=16),
    places=st.lists(st.integers(0, 400), max_size=8),
    eager=st.booleans(),
    cut_short=st.booleans(),
)
@example(["\n</parameter>", " "], [], True, False)
def test_where_the_text_is_cut_makes_no_difference_to_a_value(
    syntax: str, fragments: list[str], places: list[int], eager: bool, cut_short: bool
) -> None:
    start = WRITERS[syntax][0]("write", content="b").partition("b")[0]
    text = start + "".join(fragments)

    def result(pieces: list[str]) -> Read:
        reader = parser(syntax, eager=eager)
        return read_in_pieces(_CutShort(reader) if cut_short else reader, pieces)

    whole = result([text])
    assert result(cut(text, places)) == whole
    assert result(list(text)) == whole
    if not whole.calls:
        assert whole.content == text


class _CutShort:
    """A parser of an answer that ends before its model did."""

    def __init__(self, reader: ToolCallParser) -> None:
        self._reader = reader
        self.feed = reader.feed

    def finish(self, *, cut_short: bool = True) -> Any:
        return self._reader.finish(cut_short=cut_short)


FORMS = {"qwen3_coder": qwen, "glm45": glm_of_grammar}
OFFER = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "strict": True,
            "parameters": {
                "properties": {"path": TEXT, "content": TEXT, "mode": {"type": "integer"}},
                "required": ["path", "content"],
            },
        },
    }
]


@functools.cache
def forced(syntax: str, *, special: bool = False) -> tuple[Any, Any]:
    return plan(syntax, tools=OFFER, special=special), tokenizer(syntax, special=special)


@pytest.mark.parametrize("content", [*QUOTED, "a\n</parameter>\n\n", "</function>\n</tool_call>"])
@pytest.mark.parametrize("syntax", FORMS)
def test_a_grammar_of_calls_lets_a_value_hold_tags(syntax: str, content: str) -> None:
    """What it allows is what the parser reads: a forced call writes such a file too."""
    its, tokens = forced(syntax)
    for more in ({}, {"mode": "1"}):
        text = FORMS[syntax]("write", path="a.md", content=content, **more)
        assert conforms(tokens, its.structured_output, text)
        assert not conforms(tokens, its.structured_output, text.replace("path", "paths", 1))
        expected = {"path": "a.md", "content": content, **({"mode": 1} if more else {})}
        for pieces in ([text], list(text)):
            ((_, arguments),) = read_in_pieces(its.parser(), pieces).calls
            assert json.loads(arguments) == expected


@pytest.mark.parametrize("syntax", FORMS)
@settings(max_examples=80, deadline=None)
@given(
    content=st.lists(FRAGMENTS, max_size=12).map("".join),
    more=st.booleans(),
    places=st.lists(st.integers(0, 400), max_size=8),
)
@example("</parameter>\n<parameter=", False, [])
@example("</parameter> \n\n</function>\t</tool_call>", True, [])
@example("</parameter>" + " " * 65 + "<parameter=mode>", True, [])
def test_what_a_grammar_allows_is_read_as_it_means_it(
    syntax: str, content: str, more: bool, places: list[int]
) -> None:
    its, tokens = forced(syntax)
    arguments = {"path": "a.md", "content": content, **({"mode": "1"} if more else {})}
    text = FORMS[syntax]("write", **arguments)
    result = read_in_pieces(its.parser(), cut(text, places))
    assert result.content == ""
    if conforms(tokens, its.structured_output, text):
        (call,) = result.calls
        called = json.loads(call[1])
        assert set(called) - {"mode"} == {"path", "content"}
        assert called["content"] == content or "mode>" in content
    else:
        # The content ends the value, and something else follows.
        assert re.search(r"</(parameter|arg_value)>\s*<[/pa]", content)


@pytest.mark.parametrize("syntax", FORMS)
def test_a_grammar_allows_no_value_that_would_be_read_otherwise(syntax: str) -> None:
    its, tokens = forced(syntax)
    write = functools.partial(FORMS[syntax], "write")
    whole = write(path="a.md", content="b")
    end = whole[whole.index("b") + 1 :]
    argument = "<parameter=" if syntax == "qwen3_coder" else "<arg_key>"
    closing = "</parameter>" if syntax == "qwen3_coder" else "</arg_value>"
    for text in (
        # Ends of the call in a value that another argument has to follow.
        write(path=f"a{end} b", content="c"),
        write(path=f"a{end}", content="c"),
        # An argument in or behind a value that none may follow.
        write(path="a", mode="1", content=f"b{closing}\n{argument}c"),
        write(path="a", content=f"b{closing}\n{argument}path>c"),
        write(path="a"),
        write(content="a"),
        write(path="a", content="b", mode="c"),
    ):
        assert not conforms(tokens, its.structured_output, text), text
    alone = plan(syntax, tools=[tool("bash", command=TEXT)])
    text = FORMS[syntax]("bash", command=f"a {closing} b")
    assert conforms(tokens, alone.structured_output, text)
    text = text.replace(" b", f"{argument}b")
    assert not conforms(tokens, alone.structured_output, text)


@pytest.mark.parametrize("syntax", FORMS)
def test_forced_arguments_come_in_order_and_those_that_are_optional_may_be_left_out(
    syntax: str,
) -> None:
    properties = {"a": TEXT, "b": TEXT, "c": {"type": "integer"}, "d": TEXT, "e": TEXT}
    offered = tool("f", **properties)
    offered["function"]["parameters"]["required"] = ["a", "d"]
    its, tokens = plan(syntax, tools=[offered]), tokenizer(syntax, special=False)
    for names in ("ad", "abd", "acd", "abcd", "ade", "abcde", "a", "d", "ab", "bd", "adb", "da"):
        text = FORMS[syntax]("f", **dict.fromkeys(names, "1"))
        allowed = sorted(names) == list(names) and {"a", "d"} <= set(names)
        assert conforms(tokens, its.structured_output, text) is allowed, names
        if allowed:
            assert set(json.loads(read(its.parser(), text).calls[0][1])) == set(names)


@pytest.mark.parametrize("syntax", FORMS)
def test_a_forced_call_that_is_cut_short_shows_no_tag_in_its_arguments(syntax: str) -> None:
    its, _ = forced(syntax)
    text = FORMS[syntax]("write", path="a.md", content="hello")
    begin = text.index("hello") + 5
    for place in range(begin, len(text)):
        answer = whole_answer(its.parser(), text[:place], cut_short=True)
        (call,) = answer.tool_calls
        shown = call.arguments.removeprefix('{"path": "a.md", "content": "hello')
        # The closing tag itself may be text until it is whole.
        closing = "\\n</parameter>" if syntax == "qwen3_coder" else "</arg_value>"
        assert shown in ('"', '"}') or (closing.startswith(shown) and shown != closing)
