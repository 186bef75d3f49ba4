"""Regular expressions: which are lists of words, which are disjoint, which match a name.

Python's own matching is never used for a client's pattern, because backtracking could take forever.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Final

from llguidance import LLTokenizer

from src.engine.grammar.compiled import GrammarError, compile_matcher
from src.engine.grammar.schemas.terms import InexpressibleError
from src.engine.grammar.vocabulary import Vocabulary

_MAX_WORDS: Final = 64
_MAX_LENGTH: Final = 2000
_SET: Final = re.compile(r"\[([A-Za-z0-9_]|[A-Za-z0-9]-[A-Za-z0-9])+\]")
# Formats of the standard that the library does not support: URI templates, RFC 6570, section 2.
PATTERNS_OF_FORMATS: Final = {
    "uri-template": (
        r"^(?:[^\x00-\x20\x22\x27%<>\\\x5e\x60{|}\x7f]|%[0-9A-Fa-f]{2}|"
        r"\{[+#./;?&=,!@|]?(?:[A-Za-z0-9_.]|%[0-9A-Fa-f]{2})+(?::[1-9][0-9]{0,3}|\*)?"
        r"(?:,(?:[A-Za-z0-9_.]|%[0-9A-Fa-f]{2})+(?::[1-9][0-9]{0,3}|\*)?)*\})*$"
    )
}
# A literal prefix: plain characters, and escaped special characters.
_PREFIX: Final = re.compile(r"\^((?:[^\\^$.|?*+()\[\]{}]|\\[^A-Za-z0-9])+)")
# Characters with a special meaning, unless they are escaped.
_SPECIAL: Final = frozenset("\\^$.|?*+()[]{}")


def words_of(pattern: str) -> list[str] | None:
    """The words that an anchored pattern matches, if they are few and the pattern is simple."""
    if len(pattern) > _MAX_LENGTH or not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    if pattern.endswith("\\$"):
        return None
    reader = _Reader(pattern[1:-1])
    try:
        words = reader.alternatives(is_whole=True)
    except InexpressibleError:
        return None
    return list(dict.fromkeys(words)) if reader.is_at_end else None


def are_disjoint(one: str, other: str) -> bool:
    """Whether certainly no text matches both, because their prefixes or suffixes differ."""
    for affixes in (_prefixes, _suffixes):
        ones, others = affixes(one), affixes(other)
        if ones is not None and others is not None:
            reach = str.startswith if affixes is _prefixes else str.endswith
            return not any(reach(a, b) or reach(b, a) for a in ones for b in others)
    return False


def _prefixes(pattern: str) -> list[str] | None:
    """Texts that match begin with one of these; ``None`` if unknown."""
    found = _PREFIX.match(pattern)
    if found is None or "|" in re.sub(r"\\.|\([^()]*\)|\[[^\]]*\]", "", pattern):
        return None
    text = found[1]
    # A character that may be left out or repeated does not count.
    if pattern[found.end() :][:1] in ("?", "*", "{"):
        text = text[:-2] if text[-2:-1] == "\\" else text[:-1]
    prefix = text.replace("\\", "")
    return [prefix] if prefix else None


def _suffixes(pattern: str) -> list[str] | None:
    """Texts that match end with one of these; ``None`` if unknown."""
    return None if pattern.startswith("^") else words_of("^" + pattern)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name, according to the library, which does not backtrack.

    Raises
    ------
    InexpressibleError
        The pattern is not supported.
    """
    words = words_of(pattern)
    if words is not None:
        return name in words
    schema = json.dumps({"type": "string", "pattern": pattern})
    try:
        matcher = compile_matcher(_bytes(), f"start: %json {schema}")
    except GrammarError as error:
        raise InexpressibleError(str(error)) from None
    text = json.dumps(name, ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@functools.cache
def _bytes() -> LLTokenizer:
    """A vocabulary whose tokens are single bytes."""
    return Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [], [256]).build()


class _Reader:
    """Parses words, groups of words and sets of characters."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    @property
    def is_at_end(self) -> bool:
        return self._place == len(self._text)

    def alternatives(self, *, is_whole: bool = False) -> list[str]:
        """The words of alternatives. ``is_whole``: a bar at the top level is refused."""
        words = self._sequence()
        while self._next("|"):
            if is_whole:
                raise InexpressibleError("only one side of it is anchored")
            words += self._sequence()
            _check(words)
        return words

    def _sequence(self) -> list[str]:
        words = [""]
        while not self.is_at_end and self._text[self._place] not in "|)":
            items = self._item()
            if self._next("?"):
                items = [*items, ""]
            words = [word + item for word in words for item in items]
            _check(words)
        return words

    def _item(self) -> list[str]:
        if self._next("(?:") or self._next("("):
            words = self.alternatives()
            if not self._next(")"):
                raise InexpressibleError("a group does not end")
            return words
        found = _SET.match(self._text, self._place)
        if found is not None:
            self._place = found.end()
            return _members(found[0][1:-1])
        character = self._text[self._place]
        self._place += 1
        if character == "\\" and not self.is_at_end:
            escaped = self._text[self._place]
            self._place += 1
            if escaped.isalnum():
                raise InexpressibleError("a class of characters")
            return [escaped]
        if character in _SPECIAL:
            raise InexpressibleError("something that is not plain")
        return [character]

    def _next(self, text: str) -> bool:
        if self._text.startswith(text, self._place):
            self._place += len(text)
            return True
        return False


def _members(text: str) -> list[str]:
    """The characters of a set of letters, digits and ranges of them."""
    members: list[str] = []
    place = 0
    while place < len(text):
        if text[place + 1 : place + 2] == "-":
            members += map(chr, range(ord(text[place]), ord(text[place + 2]) + 1))
            place += 3
        else:
            members.append(text[place])
            place += 1
    _check(members)
    return members


def _check(words: list[str]) -> None:
    if len(words) > _MAX_WORDS:
        raise InexpressibleError("too many words")
