"""``/score``, ``/rerank``, ``/classify``, ``/pooling`` and ``/predict``."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from src.http.protocol.chat import MAX_MESSAGES, MAX_TEMPLATE_CHARS, ChatMessage
from src.http.protocol.cohere import CohereMeta
from src.http.protocol.embeddings import EmbeddingUsage
from src.http.protocol.inference import UnsupportedByPredictions

# A field of `UnsupportedByRanks` may be sent with one of these values: they ask for nothing.
NEUTRAL_IN_RANKS: Final[dict[str, tuple[Any, ...]]] = {
    "activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("little",),
    "instruction": (),
    "max_chunks_per_doc": (),
    "max_tokens_per_query": (),
    "mm_processor_kwargs": ({},),
    "normalize": (),
    "prompt_name": (),
    "rank_fields": (["text"],),
    "softmax": (True,),
    "truncation_direction": ("Right", "right"),
    "truncation_side": ("right",),
}

Texts: TypeAlias = str | list[str]


class UnsupportedByRanks(msgspec.Struct, kw_only=True):
    """Fields of others' protocols that would change the numbers; see `NEUTRAL_IN_RANKS`.

    Older clients have ``activation`` and ``softmax`` where newer ones have ``use_activation``.
    """

    activation: Any = None
    embed_dtype: Any = None
    endianness: Any = None
    instruction: Any = None
    max_chunks_per_doc: Any = None
    max_tokens_per_query: Any = None
    mm_processor_kwargs: Any = None
    normalize: Any = None
    prompt_name: Any = None
    rank_fields: Any = None
    softmax: Any = None
    truncation_direction: Any = None
    truncation_side: Any = None


class AcceptedByRanks(UnsupportedByRanks, kw_only=True):
    """Fields without a meaning for a server of one's own, accepted whatever they hold."""

    user: Any = None


class PooledRequest(AcceptedByRanks, kw_only=True):
    """What all of these have. ``None`` everywhere means "as if it were not there"."""

    model: str | None = None
    # Only so many tokens of a text, or of both, -1: as many as the model takes.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    # Whether numbers are made probabilities, as the checkpoint says; they are by default.
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    # Ours: seconds after which the request ends.
    timeout: Annotated[float, Meta(gt=0)] | None = None


class ScoreRequest(PooledRequest, kw_only=True):
    """``POST /score``: the two sides of pairs, under one of four pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None


class ScoreItem(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreBody(msgspec.Struct, kw_only=True):
    """The answer of ``/score``, in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage


class RerankDocument(msgspec.Struct):
    """A document that is ranked."""

    text: str


class RerankRequest(PooledRequest, kw_only=True):
    """``POST /rerank``: as Cohere, Jina and vLLM have it, or text-embeddings-inference."""

    query: str | None = None
    documents: list[str | RerankDocument] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1)] | None = None
    # text-embeddings-inference's: in place of `documents`; its answer is another one.
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document, by its index among those that were given."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankBody(msgspec.Struct, kw_only=True):
    """The answer of ``/rerank``: the best documents first, of equals the first one."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: CohereMeta


class Rank(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A text, by its index among those that were given, for text-embeddings-inference's clients."""

    index: int
    text: str | None = None
    score: float


class InputRequest(PooledRequest, kw_only=True):
    """What is asked of texts, or of a conversation."""

    # A text, token ids, or a list of either; or a conversation in its place.
    input: str | list[int | str | list[int]] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class ClassifyRequest(InputRequest, kw_only=True):
    """``POST /classify``."""


class ClassifyItem(msgspec.Struct, kw_only=True):
    """The probabilities of labels, in the model's order, and the likeliest label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyBody(msgspec.Struct, kw_only=True):
    """The answer of ``/classify``, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ClassifyItem]
    usage: EmbeddingUsage


class PoolingRequest(InputRequest, kw_only=True):
    """``POST /pooling``."""

    # What the model is asked for; by default what it does first of these.
    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class PoolingItem(msgspec.Struct, kw_only=True):
    """Numbers of one text: a list, or one for each token; or float32, little-endian, as base64."""

    index: int
    object: str = "pooling"
    data: list[float | list[float]] | str


class PoolingBody(msgspec.Struct, kw_only=True):
    """The answer of ``/pooling``, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PoolingItem]
    usage: EmbeddingUsage


class PredictRequest(UnsupportedByPredictions, kw_only=True):
    """``POST /predict``: a text, two texts that belong together, or a list of lists of these."""

    inputs: str | list[str | list[str]] | None = None
    truncate: bool | None = None
    raw_scores: bool | None = None
    # Ours: seconds after which the request ends.
    timeout: Annotated[float, Meta(gt=0)] | None = None


class Prediction(msgspec.Struct):
    """A label and its probability."""

    score: float
    label: str
