"""Where thinking ends, and where the answer begins: by definition, and as it comes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from src.core.errors import InvalidRequestError
from src.core.thinking import Thinking
from src.text.answer import PlainAnswer
from src.text.before_answer import BeforeAnswer
from src.text.output import OutputText
from src.text.reasoning import REASONING_SYNTAXES, ReasoningParser, ReasoningSyntax
from src.text.thinking import ThinkingGuide, ThinkingTracker, endings_of
from src.text.tokenizer import Tokenizer
from tests.support import tokenizers
from tests.support.slowness import own_time, slowness
from tests.text.answers import cut, read

THINK = Thinking(openings=("<think>",), closings=("</think>",))
# A tag that begins again within itself.
ODD = Thinking(openings=("[[", "<th"), closings=("]]x]]y", "]]x"), ends_before=("so",))
# Tags of which one ends as the other does.
ALIKE = Thinking(openings=("[[",), closings=("x", "]]x"), ends_before=("]x]]y",))
PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<th", "ink>", "</", "think", ">", ">\n\n", "so", " ", "\n", "s"]
    )
    | st.sampled_from(["]]x", "]", "]x]]y", "[", "[[", "y", "x", "é", "o"]),
    max_size=14,
)


def by_definition(thinking: Thinking, pieces: list[str]) -> tuple[int, bool]:
    """Tokens of thinking, and whether nothing of it can come any more."""
    text, at = "".join(pieces), 0
    if not thinking.is_open:
        begun = text.lstrip(" \t\r\n")
        opening = next((tag for tag in thinking.openings if begun.startswith(tag)), None)
        if opening is None:
            return 0, not any(tag.startswith(begun) for tag in thinking.openings)
        at = len(text) - len(begun) + len(opening)
    # The first that is complete, and of those that are so together the longest.
    ends = [
        (begin + len(tag), begin)
        for tag in (*thinking.closings, *thinking.ends_before)
        if (begin := text.find(tag, at)) >= 0
    ]
    end = min(ends)[1] if ends else -1
    starts = [sum(map(len, pieces[:index])) for index in range(len(pieces))]
    # The token in which the opening tag ends is the tag's.
    counted = [start for start in starts if start >= at]
    if end < 0:
        return len(counted), False
    return sum(start < end for start in counted), True


@pytest.mark.parametrize("thinking", [THINK, ODD, ALIKE])
@given(pieces=PIECES, is_open=st.booleans())
@example(pieces=["]", "]]x"], is_open=True)
@example(pieces=["a", "]", "]x", "b"], is_open=True)
def test_tokens_are_counted_between_the_tags(
    thinking: Thinking, pieces: list[str], is_open: bool
) -> None:
    given_ = msgspec.structs.replace(thinking, is_open=is_open)
    tracker = ThinkingTracker(given_)
    for piece in pieces:
        tracker.take(piece.encode())
    assert (tracker.num_tokens, tracker.is_over) == by_definition(given_, pieces)


@given(
    text=PIECES.map("".join),
    places=st.lists(st.integers(0, 1000), max_size=8),
    is_open=st.booleans(),
)
def test_the_answer_begins_where_the_parser_says(
    text: str, places: list[int], is_open: bool
) -> None:
    syntax = ReasoningSyntax(
        name="x", models="", opening=THINK.openings[0], closing=THINK.closings[0]
    )
    whole = read(ReasoningParser(syntax, PlainAnswer(), is_open=is_open), text)
    gate = BeforeAnswer(Thinking(openings=("<think>",), closings=("</think>",), is_open=is_open))
    before = answer = ""
    for piece in cut(text, places):
        if gate.is_over:
            answer += piece
            continue
        more, rest = gate.feed(piece)
        assert not answer or not more
        before, answer = before + more, answer + rest
        assert gate.is_over == bool(answer)
    answer += gate.finish()
    assert before + answer == text
    # Where nothing but the beginning of a tag is there, it is text.
    assert answer == whole.content


def test_the_first_of_several_tags_ends_the_thinking() -> None:
    """Whichever stands first in the list."""
    for closings in (("</a>", "</b>"), ("</b>", "</a>")):
        for text in ("x</a>", "x</b>"):
            gate = BeforeAnswer(Thinking(openings=("<a>",), closings=closings, is_open=True))
            assert gate.feed(f"{text}y</a>z</b>") == (text, "y</a>z</b>")


def tokenizer_of(backend: Any) -> Tokenizer:
    return Tokenizer(backend)


def output(stop: str, pieces: list[str], **options: Any) -> tuple[str, str | None, int]:
    """The text of byte-level tokens, what stopped it, and how many were taken."""
    tokenizer = tokenizer_of(tokenizers.byte_level())
    text = OutputText(tokenizer, stop=[stop], thinking=THINK, **options)
    shown = ""
    for piece in pieces:
        delta = text.push(tokenizer.encode(piece, add_special_tokens=False))
        shown += delta.text
        if delta.stop is not None:
            return shown, delta.stop, text.num_tokens
    return shown + text.finish(), text.stop, text.num_tokens


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "stopped"),
    [
        (["<think>a.b", ".</think>", "c.d"], ".", "<think>a.b.</think>c", True),
        # White space next to the tags is no part of the answer.
        (["<think>\na\n", "</think>\n\n", "b\nc"], "\n", "<think>\na\n</think>\n\nb", True),
        (["<think>x</think>", "x"], "</think>x", "<think>x</think>x", False),
        (["<think>a.", "b"], ".", "<think>a.b", False),
        # No thinking: all of it is the answer, also what could have been the tag.
        (["a", ".b"], ".", "a", True),
        (["<thi", "s.a"], ".", "<this", True),
        (["<th"], "h", "<t", True),
        (["\n", "a"], "\n", "", True),
    ],
)
def test_stop_strings_are_for_the_answer(
    pieces: list[str], stop: str, shown: str, stopped: bool
) -> None:
    text, by, _ = output(stop, pieces)
    assert (text, by) == (shown, stop if stopped else None)
    text, by, _ = output(stop, list("".join(pieces)))
    assert (text, by) == (shown, stop if stopped else None)


@pytest.mark.parametrize(
    "make", [tokenizers.byte_level, tokenizers.byte_fallback, tokenizers.unigram]
)
@pytest.mark.parametrize("closing", ["</think>", "[/THINK]", "\u25c1/think\u25b7"])
def test_a_tag_is_completed_from_wherever_it_stands(make: Any, closing: str) -> None:
    tokenizer = tokenizer_of(make())
    thinking = Thinking(openings=("<think>",), closings=(closing,), is_open=True, budget=3)
    if make is tokenizers.unigram:
        # A vocabulary without some of its characters, and without bytes.
        with pytest.raises(InvalidRequestError, match="thinking_token_budget"):
            endings_of(tokenizer, closing, tokenizer.vocab_size)
        return
    endings = endings_of(tokenizer, closing, tokenizer.vocab_size)
    guide = ThinkingGuide(thinking, endings, tokenizer.token_bytes)
    tag = closing.encode()
    for begun in range(len(tag)):
        tracker = guide.begin()
        for piece in (b"a", b"b"):
            assert guide.forced(tracker) is None
            tracker.take(piece)
        tracker.take(b"c" + tag[:begun])
        written = tag[:begun]
        while (token_id := guide.forced(tracker)) is not None:
            written += tokenizer.token_bytes(token_id)
            guide.follow(tracker, [token_id])
            assert len(written) <= len(tag)
        assert written == tag
        assert (tracker.is_over, tracker.num_tokens) == (True, 3)
    # As the tokenizer writes it, where it can.
    known = tokenizer.encode(closing, add_special_tokens=False)
    if b"".join(map(tokenizer.token_bytes, known)) == tag:
        tracker, forced = guide.begin(), []
        for piece in (b"a", b"b", b"c"):
            tracker.take(piece)
        while (token_id := guide.forced(tracker)) is not None:
            forced.append(token_id)
            guide.follow(tracker, [token_id])
        assert forced == known


@given(text=st.text(max_size=6), number=st.integers(0, 24))
def test_a_character_that_has_begun_is_noticed(text: str, number: int) -> None:
    data = text.encode()[:number]
    tracker = ThinkingTracker(Thinking(openings=("x",), closings=("\0\1\2",), is_open=True))
    for byte in data:
        tracker.take(bytes([byte]))
    is_whole = data == data.decode(errors="ignore").encode()
    assert tracker.is_within_character == (not is_whole)


def test_a_character_is_completed_only_where_it_must_be() -> None:
    """A grammar's output is valid Unicode; without one a budget is kept to the token."""
    thinking = Thinking(openings=("<",), closings=(">",), is_open=True, budget=1)
    guide = ThinkingGuide(thinking, [62], lambda token_id: bytes([token_id]))
    tracker = guide.begin()
    for byte, is_within in zip("é€".encode(), (True, False, True, True, False), strict=True):
        guide.follow(tracker, [byte])
        assert guide.forced(tracker) == 62
        wanted = None if is_within else 62
        assert guide.forced(tracker, completes_characters=True) == wanted


def test_a_tag_that_is_a_token_is_that_token_whatever_was_begun() -> None:
    tokenizer = tokenizer_of(tokenizers.byte_level())
    token_id = tokenizer.token_to_id("<tool call>")
    assert token_id is not None
    endings = endings_of(tokenizer, "<tool call>", tokenizer.vocab_size)
    assert endings == [token_id] * len("<tool call>")
    # One that the model does not have is spelt.
    spelt = endings_of(tokenizer, "<tool call>", token_id)
    assert token_id not in spelt


def test_white_space_before_thinking_costs_the_same_at_every_token() -> None:
    gate = BeforeAnswer(THINK)
    parser = ReasoningParser(
        ReasoningSyntax(name="x", models="", opening="<think>", closing="</think>"),
        PlainAnswer(),
        is_open=True,
    )
    with own_time() as spent:
        for _ in range(20_000):
            assert gate.feed(" " * 64) == ("", "")
            assert parser.feed(" " * 64) == []
        assert spent() < 2 * slowness()
    assert gate.finish() == " " * 64 * 20_000


HARMONY = (
    "<|channel|>analysis<|message|>a b c<|end|><|start|>assistant<|channel|>analysis<|message|>"
    "final words of the assistant<|end|>"
)


def test_all_messages_of_analysis_are_thinking() -> None:
    thinking = REASONING_SYNTAXES["openai_gptoss"].thinking(is_open=False)
    header = "<|start|>assistant<|channel|>final<|message|>"
    for size in (1, 3, 1000):
        text = HARMONY + header + "The final answer"
        gate, before, answer = BeforeAnswer(thinking), "", ""
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            some, rest = ("", piece) if gate.is_over else gate.feed(piece)
            before, answer = before + some, answer + rest
        assert (before, answer) == (HARMONY + header, "The final answer")
    tracker = ThinkingTracker(thinking)
    for character in HARMONY:
        tracker.take(character.encode())
    assert not tracker.is_over
    for character in header:
        tracker.take(character.encode())
    assert tracker.is_over


@pytest.mark.parametrize(
    "calls",
    ["<|start|>assistant to=functions.f<|channel|>", "<|channel|>commentary to=functions.f"],
)
def test_calls_of_harmony_are_no_thinking(calls: str) -> None:
    thinking = REASONING_SYNTAXES["openai_gptoss"].thinking(is_open=False)
    begun = "<|channel|>analysis<|message|>a<|end|>"
    (header,) = (text for text in thinking.ends_before if calls.startswith(text))
    for place in range(len(header)):
        gate = BeforeAnswer(thinking)
        # What was shown of it stays with the thinking, and no more but white space.
        assert gate.feed(begun + calls[:place]) == (begun + calls[:place], "")
        before, answer = gate.feed(calls[place:])
        assert (before + answer, answer) == (calls[place:], calls[place:].lstrip())
        assert gate.is_over
