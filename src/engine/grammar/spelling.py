"""Tokens by which a model would spell a text that a grammar forces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from src.core.errors import InvalidRequestError
from src.engine.grammar.vocabulary import Vocabulary

# Bytes of a forced text that are spelled at a time: more than a step verifies.
_SPELLED_BYTES: Final = 256
# What the library writes before the name of a special token.
_SPECIAL: Final = b"\xff"


class Spelling:
    """Spells texts as the model's tokenizer does.

    Whether a model writes a text so is its own choice, so such tokens are guesses.

    Parameters
    ----------
    tokenize
        The model's tokenizer, without special tokens.
    """

    def __init__(self, vocabulary: Vocabulary, tokenize: Callable[[str], list[int]]) -> None:
        self._pieces = vocabulary.tokens
        self._tokenize = tokenize

    def text(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that these tokens add behind others."""
        return b"".join([self._pieces[token_id] for token_id in token_ids])

    def spell(self, text: bytes) -> list[int]:
        """The tokens of the beginning of a text; empty if the tokenizer cannot spell it.

        A tokenizer may add a space before a text, or know no character of which a part is there.
        """
        plain = text[:_SPELLED_BYTES].partition(_SPECIAL)[0].decode(errors="ignore")
        try:
            token_ids = self._tokenize(plain) if plain else []
        except InvalidRequestError:
            return []
        if not all(token_id < len(self._pieces) for token_id in token_ids):
            return []
        return token_ids if text.startswith(self.text(token_ids)) else []


class ForcedText:
    """The text that a grammar forces behind one output, of which a part may be there already.

    A long one is asked for once, and not at every token of it.
    """

    def __init__(self) -> None:
        self._text = b""
        self._num_tokens = 0

    def behind(
        self, spelling: Spelling, token_ids: Sequence[int], find: Callable[[], bytes]
    ) -> list[int]:
        """Guesses of the tokens that follow ``token_ids``, the whole output.

        ``find`` finds the text that is forced there, if that is not known.
        """
        if self._text:
            begun = spelling.text(token_ids[self._num_tokens :])
            is_on_it = len(token_ids) >= self._num_tokens and self._text.startswith(begun)
            self._text = self._text[len(begun) :] if is_on_it else b""
        self._num_tokens = len(token_ids)
        self._text = self._text or find()
        return spelling.spell(self._text) if self._text else []
