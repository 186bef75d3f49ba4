"""A model's vocabulary as llguidance sees it: the bytes that each token adds to the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:
    from src.text import Tokenizer

# Stands before a text that is tokenized as the continuation of another; in no token but its own.
_BOUNDARY = "\x02"


class Vocabulary(msgspec.Struct, frozen=True):
    """What tells one vocabulary from another.

    Attributes
    ----------
    tokens
        Token id -> what it adds after another token; empty for ids that add nothing. As many as the
        model's logits are wide.
    special_ids
        Tokens that are no text, but may be named in a grammar.
    end_ids
        Those that end an output, at least one.
    """

    tokens: list[bytes]
    special_ids: list[int]
    end_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, end_ids: Sequence[int]) -> Vocabulary:
        """The vocabulary of a tokenizer, for logits of width ``size``."""
        special = [token_id for token_id in sorted(tokenizer.special_ids) if token_id < size]
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        for token_id in special:
            tokens[token_id] = tokenizer.added_tokens[token_id].encode()
        return cls(tokens, special, sorted({i for i in end_ids if 0 <= i < size}))

    def build(self, encode: Callable[[str], Sequence[int]] | None = None) -> LLTokenizer:
        """The form that llguidance wants; some tenths of a second for a large vocabulary.

        ``encode`` tokenizes texts that the grammar leaves no choice about the way the model knows
        them, see :func:`continuation_encoder`; without it they are tokenized greedily.
        """
        wrapper = _Wrapper(self, encode)
        built = LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=self.end_ids)
        wrapper.greedy = built.greedy_tokenize
        return built


class _Wrapper(TokenizerWrapper):
    """The attributes that ``LLTokenizer`` reads, and the call by which it tokenizes."""

    is_tokenizer_wrapper = True

    def __init__(
        self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]] | None
    ) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id: int | None = None
        self.greedy: Callable[[str], list[int]] | None = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        given = text.encode() if isinstance(text, str) else text
        spelt = given.decode(errors="replace")
        if self._encode is not None:
            ids = list(self._encode(spelt))
            # A normalizer may change a text: then it is not this text that was tokenized.
            if b"".join(map(self._bytes, ids)) == given:
                return ids
        return [] if self.greedy is None else self.greedy(spelt)

    def _bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b""


def continuation_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Tokenizes a text that follows another: without a space that some tokenizers put in front."""

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def behind_boundary(text: str) -> list[int]:
        ids = plain(_BOUNDARY + text)
        for index, token_id in enumerate(ids):
            if tokenizer.token_bytes(token_id).endswith(_BOUNDARY.encode()):
                return ids[index + 1 :]
        return []

    def spelling(encode: Callable[[str], list[int]]) -> bytes:
        return b"".join(map(tokenizer.token_bytes, encode("a")))

    return plain if spelling(plain) == b"a" else behind_boundary
