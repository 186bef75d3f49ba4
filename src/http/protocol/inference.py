"""``/embed``, ``/predict`` and ``/info``, as text-embeddings-inference has them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

# A field of `UnsupportedByInference` may be sent with one of these values: they ask for nothing.
NEUTRAL_IN_INFERENCE: Final[dict[str, tuple[Any, ...]]] = {
    "truncation_direction": ("Right", "right"),
}


class UnsupportedByInference(msgspec.Struct, kw_only=True):
    """Fields that would change what is computed; see `NEUTRAL_IN_INFERENCE`."""

    truncation_direction: Any = None


# The same of `UnsupportedByPredictions`.
NEUTRAL_IN_PREDICTIONS: Final[dict[str, tuple[Any, ...]]] = {
    **NEUTRAL_IN_INFERENCE,
    "prompt_name": (),
}


class UnsupportedByPredictions(UnsupportedByInference, kw_only=True):
    """The same where no prompt is put before a text; see `NEUTRAL_IN_PREDICTIONS`."""

    prompt_name: Any = None


class EmbedRequest(UnsupportedByInference, kw_only=True):
    """``POST /embed``. ``None`` everywhere means "as if it were not there"."""

    inputs: str | list[int | str | list[int]] | None = None
    # Keep as many tokens of each text as the model takes.
    truncate: bool | None = None
    # Scale vectors to length 1, which is what happens without it.
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    # Ours: seconds after which the request ends.
    timeout: Annotated[float, Meta(gt=0)] | None = None


class EmbeddingKind(msgspec.Struct):
    """How texts become vectors."""

    pooling: Literal["cls", "mean", "last_token"]


class LabelKind(msgspec.Struct):
    """What a head says: labels by their numbers as text, and their numbers."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelKind(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a model is, by its name here; none of them for one that only generates."""

    embedding: EmbeddingKind | None = None
    classifier: LabelKind | None = None
    reranker: LabelKind | None = None


class InfoBody(msgspec.Struct, kw_only=True):
    """The answer of ``/info``."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_type: ModelKind
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool = False
    tokenization_workers: int
    version: str
