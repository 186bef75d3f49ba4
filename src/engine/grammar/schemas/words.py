"""Regular expressions of all strings but some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from src.engine.grammar.schemas.terms import InexpressibleError

_MAX_CHARACTERS: Final = 4000


def pattern_of_others(words: Iterable[str]) -> str:
    """A pattern that every string but these words matches.

    It follows their tree of prefixes: a string is another one where it leaves the tree, ends
    within it before a word does, or goes on behind a word.

    Raises
    ------
    InexpressibleError
        The words are too long together, or have a character that JSON escapes: to the library a
        set that leaves out a quote or a backslash has it all the same.
    """
    chosen = sorted(set(words))
    if any(character in '"\\' or character < " " for word in chosen for character in word):
        raise InexpressibleError("values to leave out with characters that JSON escapes")
    if sum(map(len, chosen)) > _MAX_CHARACTERS or max(map(len, chosen), default=0) > 200:
        raise InexpressibleError("too many or too long values to leave out")
    return f"^{_behind(chosen)}$"


def pattern_of(words: Iterable[str]) -> str:
    """A pattern that these words alone match."""
    return f"^(?:{'|'.join(''.join(map(_escaped, word)) for word in words)})$"


def _behind(words: Sequence[str]) -> str:
    """What is none of these."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    branches = [_escaped(first) + _behind(rest) for first, rest in by_first.items()]
    left = "".join(map(_escaped, by_first))
    branches.append((f"[^{left}]" if left else r"[\s\S]") + r"[\s\S]*")
    # Nothing more is another string where no word ends here.
    return f"(?:{'|'.join(branches)})" + ("" if "" in words else "?")


def _escaped(character: str) -> str:
    if character.isalnum() or not character.isascii():
        return character
    return f"\\x{ord(character):02x}"
