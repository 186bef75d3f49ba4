from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.text.detokenizer import IncrementalDetokenizer, detokenize
from src.text.output import OutputText
from src.text.tokenizer import Tokenizer
from tests.support.tokenizers import BUILDERS


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(BUILDERS[kind]())


def one_shot(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool, min_tokens: int
) -> tuple[str, str | None, int]:
    """(text, stop, tokens used): the earliest end that a token from ``min_tokens`` on completes."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    pieces.append(detokenizer.flush())
    text = ""
    for number, piece in enumerate(pieces, 1):
        used = min(number, len(ids))
        for character in piece:
            text += character
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and used >= min_tokens:
                stop = max(ending, key=len)
                return text if include else text.removesuffix(stop), stop, used
    return text, None, len(ids)


@pytest.mark.parametrize("kind", BUILDERS)
@given(data=st.data())
def test_any_grouping_of_tokens_gives_the_one_shot_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=16))
    text = detokenize(tokenizer, ids)
    # Stop strings out of the text itself, so that they do occur.
    spans = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 5))
    drawn = data.draw(st.lists(spans, min_size=1, max_size=3))
    stops = [text[start : start + size] or "never" for start, size in drawn]
    include, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 8))
    expected, expected_stop, expected_used = one_shot(tokenizer, ids, stops, include, min_tokens)

    output = OutputText(tokenizer, stop=stops, include_stop=include, min_tokens=min_tokens)
    shown, used, position = "", 0, 0
    while position < len(ids) and output.stop is None:
        size = data.draw(st.integers(1, 4))
        delta = output.push(ids[position : position + size])
        shown, used, position = shown + delta.text, used + delta.num_tokens, position + size
        assert expected.startswith(shown)
        assert delta.stop == output.stop
    shown += output.finish()
    assert (shown, output.stop, used) == (expected, expected_stop, expected_used)
    assert output.num_tokens == used


def test_tokens_after_the_stop_string_are_not_used() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = [tokenizer.token_to_id(character) for character in "abcdef"]
    output = OutputText(tokenizer, stop=["cd"])
    assert output.push(ids) == ("ab", "cd", 4)
    assert output.push(ids) == ("", "cd", 0)
    assert output.finish() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    tokenizer = tokenizer_of("byte_level")
    output = OutputText(tokenizer)
    assert output.push(tokenizer.encode("Hello world")) == ("Hello world", None, output.num_tokens)
    assert output.stop is None
    assert output.finish() == ""


def test_special_tokens_show_only_when_they_are_asked_for() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("one<|end|>", add_special_tokens=False)
    assert OutputText(tokenizer).push(ids).text == "one"
    assert OutputText(tokenizer, skip_special_tokens=False).push(ids).text == "one<|end|>"
    assert (
        OutputText(tokenizer, stop=["<|end|>"], skip_special_tokens=False).push(ids).text == "one"
    )


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_output_that_stands_alone_begins_with_its_own_bytes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    *prompt, last = tokenizer.encode("fox \u2603", add_special_tokens=False)
    assert tokenizer.decode([last]) == "\ufffd"
    ids = tokenizer.encode("|x", add_special_tokens=False)

    def text(given: list[int], *, stands_alone: bool) -> str:
        first = OutputText(tokenizer, prompt, stands_alone=stands_alone)
        first.push(given)
        # Other completions of the same prompt, which is not read again.
        output = OutputText(tokenizer, first.after_prompt, stands_alone=stands_alone)
        pushed = "".join(output.push([i]).text for i in given) + output.finish()
        assert pushed == detokenize(tokenizer, given, prompt) or stands_alone
        return pushed

    assert text([last], stands_alone=False) == "\u2603"
    assert text(ids, stands_alone=False).startswith("\ufffd")
    assert text(ids, stands_alone=True).strip() == "|x"
    assert text([last], stands_alone=True) == "\ufffd"
