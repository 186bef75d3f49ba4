from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.text.answer import PlainAnswer
from src.text.reasoning import REASONING_SYNTAXES, ReasoningParser
from src.text.tool_calls.parser import ToolCallParser
from src.text.tool_calls.syntaxes import SYNTAXES
from tests.text.answers import Read, cut, read, read_in_pieces

CALL_TEXT = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
FRAGMENTS = ("<thi", "</th", "\n", "  ", "so", "<response>", "</response>", "final", "analysis")
CALLS = {
    "openai_gptoss": (
        "openai",
        "<|start|>assistant<|channel|>commentary to=functions.add<|message|>{}<|call|>",
    ),
    "kimi_k2": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
}


def texts(syntax: str) -> st.SearchStrategy[str]:
    its = REASONING_SYNTAXES[syntax]
    call = CALLS.get(syntax, ("", CALL_TEXT))[1]
    fragments = [*FRAGMENTS, *its.tags, call, call[:20], call[20:]]
    piece = st.one_of(st.sampled_from(fragments), st.text(max_size=3))
    return st.lists(piece, max_size=12).map("".join)


def parser(syntax: str = "think", *, is_open: bool = False, tools: bool = False) -> ReasoningParser:
    calls = CALLS.get(syntax, ("hermes", ""))[0]
    rest = ToolCallParser(SYNTAXES[calls], ["add"]) if tools else PlainAnswer()
    return ReasoningParser(REASONING_SYNTAXES[syntax], rest, is_open=is_open)


@pytest.mark.parametrize("syntax", REASONING_SYNTAXES)
@given(
    data=st.data(),
    places=st.lists(st.integers(0, 1000), max_size=8),
    is_open=st.booleans(),
    tools=st.booleans(),
)
def test_where_the_text_is_cut_makes_no_difference(
    syntax: str, data: st.DataObject, places: list[int], is_open: bool, tools: bool
) -> None:
    text = data.draw(texts(syntax))
    whole = read(parser(syntax, is_open=is_open, tools=tools), text)
    assert read_in_pieces(parser(syntax, is_open=is_open, tools=tools), cut(text, places)) == whole
    assert read_in_pieces(parser(syntax, is_open=is_open, tools=tools), text) == whole


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
START = "<|start|>assistant"
CALL = [("add", "{}")]


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        ("openai_gptoss", f"{ANALYSIS}So.<|end|>{START}{FINAL}Yes.", Read("Yes.", [], "So.")),
        ("openai_gptoss", f"{FINAL}Yes.<|return|>", Read("Yes.", [])),
        ("openai_gptoss", f"{ANALYSIS}So it", Read("", [], "So it")),
        # several messages, one of them a preamble, and a call
        (
            "openai_gptoss",
            f"{ANALYSIS}a<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>"
            f"{START}{ANALYSIS}b<|end|>{START}{FINAL}<|end|>{CALLS['openai_gptoss'][1]}",
            Read("I look.", CALL, "a\nb"),
        ),
        # an end that is missing; a call of nobody, with its header; what is no message
        ("openai_gptoss", f"{ANALYSIS}a{START}{FINAL}b{FINAL}c", Read("b\nc", [], "a")),
        (
            "openai_gptoss",
            f"{ANALYSIS}a<|end|>{START}<|channel|>commentary to=python<|message|>1<|call|>",
            Read(f"{START}<|channel|>commentary to=python<|message|>1<|call|>", [], "a"),
        ),
        ("openai_gptoss", "Yes. <|channel|>\nno", Read("Yes. <|channel|>\nno", [])),
        (
            "granite",
            "Here is my thought process:\nSo.\n\nHere is my response:\nYes.",
            Read("Yes.", [], "So."),
        ),
        ("granite", "Here's my thought process: a Here's my response: b", Read("b", [], "a")),
        ("granite", "<think>So.</think>\n<response>\nYes.\n</response>\n", Read("Yes.", [], "So.")),
        ("granite", "<think>So.</think><response>Yes. ", Read("Yes. ", [], "So.")),
        ("granite", "<response>Yes.</response>", Read("Yes.", [])),
        ("granite", "Here is a <response>.", Read("Here is a <response>.", [])),
        ("kimi", "◁think▷So.◁/think▷Yes.", Read("Yes.", [], "So.")),
        ("kimi_k2", f"<think>So.</think>{CALLS['kimi_k2'][1]}", Read("", CALL, "So.")),
        # a call ends the thinking that nobody closed
        ("kimi_k2", f"<think>So. {CALLS['kimi_k2'][1]}", Read("", CALL, "So.")),
    ],
)  # fmt: skip
def test_every_family_marks_its_reasoning(syntax: str, text: str, expected: Read) -> None:
    assert read(parser(syntax, tools=True), text) == expected
    for place in range(1, len(text)):
        assert read_in_pieces(parser(syntax, tools=True), cut(text, [place])) == expected


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
        ("think", "<|assistant|>", None, "undecided"),
        ("think", "<|assistant|><think>\n", None, "open"),
        ("think", "<|assistant|><think>\n\n</think>\n\n", None, "closed"),
        # what somebody wrote earlier in the prompt is not the template's
        ("think", "what is <think>?<|assistant|>", None, "undecided"),
        ("think", "<|assistant|><think>I was about", "<think>I was about", "open"),
        ("think", "<|assistant|><think>so</think>It is", "<think>so</think>It is", "closed"),
        # The template has opened it, or has shown it before the text.
        ("think", "<|assistant|><think>\nI was about", "I was about ", "open"),
        ("think", "<|assistant|><think>so</think>\n\nIt is", "It is", "closed"),
        ("think", "what is <think>?<|assistant|>It is", "It is", "closed"),
        ("think", "what is </think>?<|assistant|><think>\nIt is", "It is", "open"),
        # More than is looked at of the prompt.
        ("think", "and so on", "<think>It is and so on", "open"),
        ("think", "<|assistant|>It is", "It is", "closed"),
        ("deepseek_r1", "<|assistant|>", None, "open"),
        ("mistral", "[/INST][THINK]", None, "open"),
        ("openai_gptoss", "<|start|>assistant", None, "undecided"),
        ("openai_gptoss", f"{START}{ANALYSIS}I was about", "I was about", "open"),
        ("openai_gptoss", f"{START}{ANALYSIS}so<|end|>{START}{FINAL}It is", "It is", "closed"),
        ("openai_gptoss", f"what is {ANALYSIS}?<|end|>{START}It is", "It is", "closed"),
        ("granite", "<|end_of_role|>Here is my thought process:", None, "open"),
    ],
)
def test_what_an_answer_begins_with_is_read_off_the_prompt(
    syntax: str, prompt_end: str, continued: str | None, stage: str
) -> None:
    assert REASONING_SYNTAXES[syntax].stage(prompt_end, continued=continued) == stage
