"""The first tokens of a text, without tokenizing all of a text that is far longer.

A tokenizer whose tokens have a longest spelling refuses a text by its characters
(`src.text.token_length`). Others may make one token, or none, of any number of characters, so that
only tokens say how long a text is. Here ever longer beginnings of it are tokenized, until there are
enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from src.text.token_length import UNBOUNDED
from src.text.tokenizer import Tokenizer

# Tokens at the end of a beginning that may be others in the whole text: those of the word that it
# ends in. WordPiece makes one token of a word of over 100 characters.
_MARGIN: Final = 256
# Characters of the first beginning for each of its tokens: twice those of most texts. Then this
# many times as much.
_CHARS_PER_TOKEN: Final = 8
_GROWTH: Final = 4


class Beginning(NamedTuple):
    """Tokens of a text.

    Attributes
    ----------
    ids
        Token ids.
    is_whole
        Whether they are those of the whole text, and not of its beginning only.
    """

    ids: list[int]
    is_whole: bool


def encode_beginning(
    tokenizer: Tokenizer, text: str, enough: int, add_special_tokens: bool = True
) -> Beginning:
    """The tokens of a text, or of a beginning of it that has over ``enough`` of them.

    The first ``enough`` are those of the whole text. With special tokens, those that stand behind a
    text stand behind its beginning.

    Raises
    ------
    InvalidRequestError
        As of `Tokenizer.encode`.
    """
    if tokenizer.max_token_chars == UNBOUNDED:
        least = enough + _MARGIN
        size = _CHARS_PER_TOKEN * least
        while size < len(text):
            ids = tokenizer.encode(text[: _cut(text, size)], add_special_tokens)
            if len(ids) > least:
                return Beginning(ids, False)
            size *= _GROWTH
    return Beginning(tokenizer.encode(text, add_special_tokens), True)


def kept_chars(enough: int) -> int:
    """Up to so many characters a text is its own beginning, see `begins`."""
    return _CHARS_PER_TOKEN * (enough + _MARGIN)


def begins(encode: Callable[[str], list[int]], text: str, enough: int) -> str:
    """A beginning of a text that has over ``enough`` tokens; the text itself if it is not longer.

    The first ``enough`` are those of the whole text. A text that is hardly longer stays whole, and
    is not tokenized at all: up to `kept_chars`.
    """
    least = enough + _MARGIN
    size = kept_chars(enough)
    while size < len(text):
        begin = text[: _cut(text, size)]
        if len(encode(begin)) > least:
            return begin
        size *= _GROWTH
    return text


def _cut(text: str, size: int) -> int:
    """Where the beginning ends: in front of a space, if there is one in its last quarter."""
    space = text.rfind(" ", size - size // 4, size)
    return size if space < 0 else space
