"""``/v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``POST /v1/embeddings``. ``None`` everywhere means "as if it were not there"."""

    model: str | None = None
    # A text, token ids, or a list of either.
    input: str | list[int | str | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: Any = None
    # vLLM's. Only so many tokens of a text, -1: as many as the model takes.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    # sentence-transformers': the name of a prompt of the checkpoint's.
    prompt_name: str | None = None
    # Ours: seconds after which the request ends.
    timeout: Annotated[float, Meta(gt=0)] | None = None


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all texts; none is generated."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, kw_only=True):
    """The vector of one text: numbers, or float32 in little-endian order as base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/embeddings``, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage
