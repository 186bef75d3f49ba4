"""Tokens of a forced text, asked for once."""

from __future__ import annotations

from src.engine.grammar.spelling import ForcedText, Spelling
from src.engine.grammar.vocabulary import Vocabulary

VOCABULARY = Vocabulary([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xc3\xa9"], [], [0])


def spelling() -> Spelling:
    known = {"ab": [2], "a": [0], "b": [1], "é": [5], "c": [9], "x": [0, 1]}

    def tokenize(text: str) -> list[int]:
        longest = next((n for n in (2, 1) if text[:n] in known), None)
        return [] if longest is None else [*known[text[:longest]], *tokenize(text[longest:])]

    return Spelling(VOCABULARY, tokenize)


def test_a_text_is_spelled_as_the_tokenizer_does() -> None:
    made = spelling()
    assert made.spell(b"abab") == [2, 2]
    # Up to a special token, and to a character of which only the beginning is forced.
    assert made.spell(b"ab\xff[7]b") == [2]
    assert made.spell("aé".encode() + b"\xc3") == [0, 5]
    # Tokens of another text, and ids that the model does not have.
    assert made.spell(b"x") == []
    assert made.spell(b"c") == []
    assert made.spell(b"") == []


def test_a_forced_text_is_found_once_and_followed() -> None:
    made, forced = spelling(), ForcedText()
    asked: list[bytes] = []

    def find(text: bytes) -> bytes:
        asked.append(text)
        return text

    assert forced.behind(made, [1], lambda: find(b"abab")) == [2, 2]
    assert forced.behind(made, [1, 2], lambda: find(b"wrong")) == [2]
    # Another spelling of the same text.
    assert forced.behind(made, [1, 2, 0], lambda: find(b"wrong")) == [1]
    assert asked == [b"abab"]
    # It has been written: what follows is not known.
    assert forced.behind(made, [1, 2, 0, 1], lambda: find(b"")) == []
    assert forced.behind(made, [1, 2, 0, 1, 1], lambda: find(b"a")) == [0]
    # The output went elsewhere, or back.
    assert forced.behind(made, [1, 2, 0, 1, 1, 1], lambda: find(b"b")) == [1]
    assert forced.behind(made, [1], lambda: find(b"ab")) == [2]
    assert asked == [b"abab", b"", b"a", b"b", b"ab"]
