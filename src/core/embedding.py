"""How texts become vectors: what a checkpoint says of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from src.core.request import Pooling

# Names under which checkpoints have the prompt of documents; the first one counts.
_OF_DOCUMENTS = ("document", "passage", "corpus")


class EmbeddingRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """From a text to its vector.

    Attributes
    ----------
    pooling
        Which hidden states of its tokens make the vector.
    size
        Numbers of the vector.
    token_size
        Numbers of a token's vector: modules behind the pooling do not change these.
    normalizes
        Whether it is scaled to length 1.
    max_tokens
        The most tokens of a text, special ones included; the model's context may be longer.
    prompts
        Name -> what is put before a text that is meant so.
    default_prompt
        The name that counts if a request gives none; ``None``: nothing is put before.
    pools_prompt
        Whether the tokens of what is put before a text are pooled with it. They are always seen.
    sizes
        To how many of its first numbers a vector may be cut, since it was trained so (Matryoshka);
        empty: to any number. ``None``: it may not be cut.
    """

    pooling: Pooling
    size: int
    token_size: int
    normalizes: bool = False
    max_tokens: int
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    pools_prompt: bool = True
    sizes: tuple[int, ...] | None = None

    @property
    def query_prompt(self) -> str:
        """What is put before a query that documents are compared with.

        Like `document_prompt` as in sentence-transformers' `encode_query` and `encode_document`,
        for which the default prompt does not count.
        """
        return self.prompts.get("query", "")

    @property
    def document_prompt(self) -> str:
        """What is put before a document that is compared with a query."""
        return next((self.prompts[name] for name in _OF_DOCUMENTS if name in self.prompts), "")
