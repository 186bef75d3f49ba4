from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.text.answer import PlainAnswer
from src.text.reasoning import REASONING_SYNTAXES, ReasoningParser
from src.text.tool_calls.parser import ToolCallParser
from src.text.tool_calls.syntaxes import SYNTAXES
from tests.text.answers import Read, cut, read, read_in_pieces

THINK = REASONING_SYNTAXES["think"]
CALL_TEXT = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
FRAGMENTS = ("<think>", "</think>", "<thi", "</th", "\n", "  ", "so", CALL_TEXT, "<tool_call>")
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=10).map(
    "".join
)


def parser(*, is_open: bool = False, tools: bool = False) -> ReasoningParser:
    rest = ToolCallParser(SYNTAXES["hermes"], ["add"]) if tools else PlainAnswer()
    return ReasoningParser(THINK, rest, is_open=is_open)


@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 1000), max_size=8),
    is_open=st.booleans(),
    tools=st.booleans(),
)
def test_where_the_text_is_cut_makes_no_difference(
    text: str, places: list[int], is_open: bool, tools: bool
) -> None:
    whole = read(parser(is_open=is_open, tools=tools), text)
    assert read_in_pieces(parser(is_open=is_open, tools=tools), cut(text, places)) == whole
    assert read_in_pieces(parser(is_open=is_open, tools=tools), text) == whole


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nSo it is.\n</think>\n\nYes.", False, Read("Yes.", [], "So it is.")),
        (" <think>a  b</think>Yes. ", False, Read("Yes. ", [], "a  b")),
        ("\nSo it is.\n</think>\n\nYes.", True, Read("Yes.", [], "So it is.")),
        # the tag may come although the prompt has opened it
        ("<think>\nSo.</think>Yes.", True, Read("Yes.", [], "So.")),
        # never closed
        ("<think>So it is ", False, Read("", [], "So it is")),
        ("So it is </thi", True, Read("", [], "So it is </thi")),
        # never opened, or not at the beginning
        ("Yes.</think>", False, Read("Yes.</think>", [])),
        ("Say <think>so</think>", False, Read("Say <think>so</think>", [])),
        ("  Yes.", False, Read("  Yes.", [])),
        ("<thin", False, Read("<thin", [])),
        ("", False, Read("", [])),
        ("<think>\n\n</think>\n\nYes.", False, Read("Yes.", [])),
        ("<think>a</think>b<think>c</think>", False, Read("b<think>c</think>", [], "a")),
    ],
)
def test_reasoning_is_set_apart(text: str, is_open: bool, expected: Read) -> None:
    assert read(parser(is_open=is_open), text) == expected
    assert read_in_pieces(parser(is_open=is_open), text) == expected


def test_calls_are_made_after_the_reasoning_and_not_in_it() -> None:
    text = f"<think>Perhaps {CALL_TEXT}.</think>\n\nWell.\n{CALL_TEXT}"
    expected = Read("Well.\n", [("add", "{}")], f"Perhaps {CALL_TEXT}.")
    assert read(parser(tools=True), text) == expected
    assert read_in_pieces(parser(tools=True), text) == expected


@pytest.mark.parametrize(
    ("syntax", "prompt_end", "continued", "stage"),
    [
        ("think", "<|assistant|>", False, "undecided"),
        ("think", "<|assistant|><think>\n", False, "open"),
        ("think", "<|assistant|><think>\n\n</think>\n\n", False, "closed"),
        # what somebody wrote earlier in the prompt is not the template's
        ("think", "what is <think>?<|assistant|>", False, "undecided"),
        ("think", "<|assistant|><think>I was about", True, "open"),
        ("think", "<|assistant|><think>so</think>It is", True, "closed"),
        ("think", "<|assistant|>It is", True, "closed"),
        ("deepseek_r1", "<|assistant|>", False, "open"),
        ("mistral", "[/INST][THINK]", False, "open"),
    ],
)
def test_what_an_answer_begins_with_is_read_off_the_prompt(
    syntax: str, prompt_end: str, continued: bool, stage: str
) -> None:
    assert REASONING_SYNTAXES[syntax].stage(prompt_end, continued=continued) == stage
