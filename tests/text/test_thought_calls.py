"""Calls in thinking that is never closed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.config import ChatSection
from src.core.thinking import Thinking
from src.text.answer import ToolOffer
from src.text.answer_plan import plan_answer
from src.text.chat_template import ChatTemplate
from src.text.reasoning import REASONING_SYNTAXES, ReasoningParser
from src.text.thought_calls import ThoughtCalls, leaves_thinking_open
from src.text.tokenizer import Tokenizer
from src.text.tool_calls.parser import ToolCallParser
from src.text.tool_calls.syntaxes import SYNTAXES
from tests.support import tokenizers
from tests.text.answers import Read, cut, read, read_in_pieces

THINK = REASONING_SYNTAXES["think"]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
OTHER = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'
ADD = ("add", '{"a": 1}')
FRAGMENTS = (
    "<think>",
    "</think>",
    "<thi",
    "</th",
    "\n",
    "  ",
    "so",
    CALL,
    OTHER,
    "<tool_call>",
    "{",
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def plain(*, is_open: bool = False) -> ReasoningParser:
    rest = ToolCallParser(SYNTAXES["hermes"], ["add"])
    return ReasoningParser(THINK, rest, is_open=is_open)


def parser(*, is_open: bool = False, parallel: bool = True) -> ThoughtCalls:
    thinking = Thinking(openings=("<think>",), closings=("</think>",), is_open=is_open)
    calls = ToolCallParser(SYNTAXES["hermes"], ["add"], parallel=parallel)
    return ThoughtCalls(plain(is_open=is_open), calls, thinking)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<think>Let me.\n{CALL}", Read("", [ADD], "Let me.")),
        (f"<think>{CALL}", Read("", [ADD])),
        (f"<think>Let me.{CALL}\n{CALL}\n", Read("", [ADD, ADD], "Let me.")),
        (f"<think>Let me.{CALL} And so", Read("", [ADD], "Let me.And so")),
        # Closed: it was a thought.
        (f"<think>Perhaps {CALL}.</think>\n\nNo.", Read("No.", [], f"Perhaps {CALL}.")),
        (f"<think>Perhaps {CALL}</think>", Read("", [], f"Perhaps {CALL}")),
        (f"<think>a</think>{CALL}", Read("", [ADD], "a")),
        (f"<think>a {CALL}</think>{CALL}", Read("", [ADD], f"a {CALL}")),
        # No whole call of a function that is offered.
        (f"<think>a {OTHER}", Read("", [], f"a {OTHER}")),
        (f"<think>a {CALL[:-20]}", Read("", [], f"a {CALL[:-20]}")),
        ("<think>a <tool_call> b", Read("", [], "a <tool_call> b")),
        ("<think>a ", Read("", [], "a")),
        (f"{CALL}", Read("", [ADD])),
        ("a", Read("a", [])),
    ],
)
def test_a_call_in_thinking_that_never_ends_is_one(text: str, expected: Read) -> None:
    assert read(parser(), text) == expected
    assert read_in_pieces(parser(), text) == expected


def test_there_is_one_where_there_may_be_one() -> None:
    assert read(parser(parallel=False), f"<think>{CALL}{CALL}").calls == [ADD]


@given(text=TEXTS, places=st.lists(st.integers(0, 1000), max_size=8), is_open=st.booleans())
def test_where_the_text_is_cut_makes_no_difference(
    text: str, places: list[int], is_open: bool
) -> None:
    whole = read(parser(is_open=is_open), text)
    assert read_in_pieces(parser(is_open=is_open), cut(text, places)) == whole
    assert read_in_pieces(parser(is_open=is_open), text) == whole
    # Without such a call it is read as ever.
    if not whole.calls or "</think>" in text:
        assert whole == read(plain(is_open=is_open), text)


def test_a_call_that_comes_to_nothing_does_not_hold_reasoning_back() -> None:
    reader = parser(is_open=True)
    shown = "".join(
        event.text  # type: ignore[union-attr]
        for piece in ("Well <tool_call>", '{"name": "nobody"', "} and so", " on")
        for event in reader.feed(piece)
    )
    assert shown == 'Well <tool_call>{"name": "nobody"} and so on'


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
CALLS = (
    "{% for t in m.tool_calls or [] %}<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}"
)
LEAVES_OPEN = HEAD + "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}"
CLOSES = LEAVES_OPEN.replace("{% endif %}", "</think>{% endif %}")


@pytest.mark.parametrize(
    ("template", "leaves_open"),
    [
        (LEAVES_OPEN + CALLS + "{% endfor %}", True),
        (CLOSES + CALLS + "{% endfor %}", False),
        # Thinking is not shown, or calls are not.
        (HEAD + CALLS + "{% endfor %}</think>", False),
        (LEAVES_OPEN + "{% endfor %}</think>", False),
        (LEAVES_OPEN.replace("<think>", "") + CALLS + "{% endfor %}<think>", False),
        ("{{ raise_exception('no tools') }}</think><tool_call>", False),
    ],
)
def test_the_template_says_whether_models_do_so(template: str, leaves_open: bool) -> None:
    chat = ChatTemplate(template)
    assert leaves_thinking_open(chat, "<think>", "</think>", "<tool_call>") is leaves_open
    tokenizer = Tokenizer(tokenizers.byte_level(), chat_template=chat)
    offer = ToolOffer(tools=[{"type": "function", "function": {"name": "add"}}])

    def calls(setting: str) -> bool:
        settings = ChatSection(
            calls_in_reasoning=setting,  # type: ignore[arg-type]
            reasoning_parser="think",
            tool_call_parser="hermes",
        )
        plan = plan_answer(tokenizer, settings, [5, 6], offer)
        found = read(plan.parser(), f"<think>a {CALL}")
        assert (found.calls == [ADD]) == plan.calls_in_reasoning
        return plan.calls_in_reasoning

    assert (calls("auto"), calls("on"), calls("off")) == (leaves_open, True, False)


def test_without_tools_nothing_is_a_call() -> None:
    tokenizer = Tokenizer(tokenizers.byte_level())
    settings = ChatSection(calls_in_reasoning="on", reasoning_parser="think")
    plan = plan_answer(tokenizer, settings, [5, 6], ToolOffer())
    assert not plan.calls_in_reasoning
    assert read(plan.parser(), f"<think>{CALL}") == Read("", [], CALL)
