"""``/v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from src.http.protocol.chat import MAX_MESSAGES, MAX_TEMPLATE_CHARS, ChatMessage

# A field of `UnsupportedByEmbeddings` may be sent with one of these values: they ask for nothing.
NEUTRAL_IN_EMBEDDINGS: Final[dict[str, tuple[Any, ...]]] = {
    "embed_dtype": ("float32",),
    "endianness": ("little",),
    "input_type": (),
    "late_chunking": (False,),
    "mm_processor_kwargs": ({},),
    "normalize": (),
    "task": (),
    "truncation_side": ("right",),
    "use_activation": (),
}


class UnsupportedByEmbeddings(msgspec.Struct, kw_only=True):
    """Fields of others' protocols that would change the vectors; see `NEUTRAL_IN_EMBEDDINGS`."""

    embed_dtype: Any = None
    endianness: Any = None
    input_type: Any = None
    late_chunking: Any = None
    mm_processor_kwargs: Any = None
    normalize: Any = None
    task: Any = None
    truncation_side: Any = None
    use_activation: Any = None


class AcceptedByEmbeddings(UnsupportedByEmbeddings, kw_only=True):
    """Fields without a meaning for a server of one's own, accepted whatever they hold."""

    user: Any = None


class EmbeddingRequest(AcceptedByEmbeddings, kw_only=True):
    """``POST /v1/embeddings``. ``None`` everywhere means "as if it were not there"."""

    model: str | None = None
    # A text, token ids, or a list of either; or a conversation in its place.
    input: str | list[int | str | list[int]] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    # vLLM's. Only so many tokens of a text, -1: as many as the model takes.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
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
