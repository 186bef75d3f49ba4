"""A model's vocabulary for llguidance: the bytes that each token adds to the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:
    from src.text import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of all tokens, and the special tokens.

    Attributes
    ----------
    tokens
        Token id -> the bytes that it adds behind another token; empty if it adds none. Its length
        is the width of the model's logits.
    special_ids
        Tokens that are not text, but can be named in a grammar.
    end_ids
        Tokens that end an output, at least one.
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

    def build(self) -> LLTokenizer:
        """Build llguidance's tokenizer; takes some tenths of a second for a large vocabulary."""
        wrapper = _Wrapper(self)
        built = LLTokenizer(wrapper, n_vocab=len(self.tokens), eos_token=self.end_ids)
        wrapper.greedy = built.greedy_tokenize
        return built


class _Wrapper(TokenizerWrapper):
    """The attributes that ``LLTokenizer`` reads, and the call that it tokenizes with."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id: int | None = None
        self.greedy: Callable[[str], list[int]] | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        # Masks do not depend on this, because grammars allow every tokenization of a text.
        return [] if self.greedy is None else self.greedy(_as_text(text))


def _as_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode(errors="replace")
