"""Regular expressions for all strings except some words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from src.engine.grammar.schemas.terms import InexpressibleError

_MAX_CHARACTERS: Final = 4000


def pattern_of_others(words: Iterable[str]) -> str:
    """A pattern that every string but these words matches.

    It follows the words' tree of prefixes. A string is not one of the words if it leaves the tree,
    ends within the tree where no word ends, or goes on behind a word.

    Raises
    ------
    InexpressibleError
        The words are too long together, or have a character that JSON escapes: in the library a
        negated set of a quote or a backslash still contains it.
    """
    chosen = sorted(set(words))
    if any(character in '"\\' or character < " " for word in chosen for character in word):
        raise InexpressibleError("values to leave out with characters that JSON escapes")
    if sum(map(len, chosen)) > _MAX_CHARACTERS or max(map(len, chosen), default=0) > 200:
        raise InexpressibleError("too many or too long values to leave out")
    return f"^{_behind(chosen)}$"


def pattern_of(words: Iterable[str]) -> str:
    """A pattern that matches only these words."""
    return f"^(?:{'|'.join(''.join(map(_escaped, word)) for word in words)})$"


def _behind(words: Sequence[str]) -> str:
    """An expression for the strings that are none of these words."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    branches = [_escaped(first) + _behind(rest) for first, rest in by_first.items()]
    left = "".join(map(_escaped, by_first))
    branches.append((f"[^{left}]" if left else r"[\s\S]") + r"[\s\S]*")
    # If no word ends here, the string may end here.
    return f"(?:{'|'.join(branches)})" + ("" if "" in words else "?")


def _escaped(character: str) -> str:
    if character.isalnum() or not character.isascii():
        return character
    return f"\\x{ord(character):02x}"
