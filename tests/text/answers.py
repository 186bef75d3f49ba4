"""Reading answers in one piece, in pieces, and character by character."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from src.text.answer import Answer, AnswerParser, whole_answer


class Read(NamedTuple):
    """An answer without its ids, to compare."""

    content: str
    calls: list[tuple[str, str]]
    reasoning: str = ""


def seen(answer: Answer) -> Read:
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return Read(answer.content, calls, answer.reasoning)


def read(parser: AnswerParser, text: str) -> Read:
    return seen(whole_answer(parser, text))


def read_in_pieces(
    parser: AnswerParser,
    pieces: Iterable[str],
    after_each: Callable[[Answer], None] = lambda answer: None,
) -> Read:
    answer = Answer()
    for piece in pieces:
        answer.add(parser.feed(piece))
        after_each(answer)
    answer.add(parser.finish())
    after_each(answer)
    return seen(answer)


def cut(text: str, places: Iterable[int]) -> list[str]:
    """The text cut at these places, of which some may be alike: then a piece is empty."""
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]
