"""``/v2/embed``, Cohere's."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

EmbeddingType: TypeAlias = Literal["float", "base64", "binary", "ubinary"]

# A field of `UnsupportedByCohere` may be sent with one of these values: they ask for nothing.
NEUTRAL_IN_COHERE: Final[dict[str, tuple[Any, ...]]] = {"images": ([],), "inputs": ([],)}


class UnsupportedByCohere(msgspec.Struct, kw_only=True):
    """Pictures, and texts among them; see `NEUTRAL_IN_COHERE`."""

    images: Any = None
    inputs: Any = None


class CohereEmbedRequest(UnsupportedByCohere, kw_only=True):
    """``POST /v2/embed``. ``None`` everywhere means "as if it were not there"."""

    model: str | None = None
    texts: list[str] | None = None
    # Which prompt of the checkpoint is put before texts.
    input_type: str | None = None
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1, max_length=4)] | None = None
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    truncate: Literal["NONE", "END"] | None = None
    # Keep only so many tokens of each text.
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    # vLLM's
    priority: int | None = None
    # Ours: seconds after which the request ends.
    timeout: Annotated[float, Meta(gt=0)] | None = None


class ApiVersion(msgspec.Struct):
    """Of Cohere's protocol."""

    version: str = "2"


class BilledUnits(msgspec.Struct, omit_defaults=True):
    """What an answer would be paid for by."""

    input_tokens: int | None = None
    search_units: int | None = None


class CohereMeta(msgspec.Struct, kw_only=True):
    """What is said beside an answer."""

    api_version: ApiVersion = msgspec.field(default_factory=ApiVersion)
    billed_units: BilledUnits


class CohereEmbeddings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The vectors in the order of the texts, in each of the forms that were asked for.

    ``base64`` is of float32 in little-endian order. ``ubinary`` and ``binary`` have a bit for each
    number, 1 where it is over 0, as bytes from 0, or from -128.
    """

    float_: list[list[float]] | None = msgspec.field(default=None, name="float")
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereEmbedBody(msgspec.Struct, kw_only=True):
    """The answer of ``/v2/embed``."""

    id: str
    response_type: str = "embeddings_by_type"
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
