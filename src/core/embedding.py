"""How texts become vectors: what a checkpoint says of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from src.core.request import Pooling


class EmbeddingRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """From a text to its vector.

    Attributes
    ----------
    pooling
        Which hidden states of its tokens make the vector.
    size
        Numbers of the vector.
    normalizes
        Whether it is scaled to length 1.
    max_tokens
        The most tokens of a text, special ones included; the model's context may be longer.
    prompts
        Name -> what is put before a text that is meant so.
    default_prompt
        The name that counts if a request gives none; ``None``: nothing is put before.
    sizes
        To how many of its first numbers a vector may be cut, since it was trained so (Matryoshka);
        empty: to any number. ``None``: it may not be cut.
    """

    pooling: Pooling
    size: int
    normalizes: bool = False
    max_tokens: int
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    sizes: tuple[int, ...] | None = None
