"""``GET /info``: what clients of text-embeddings-inference ask of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from src.core.cpus import usable_cpus
from src.core.request import Pooling
from src.core.status import ModelInfo
from src.core.version import VERSION
from src.http.protocol.inference import EmbeddingKind, InfoBody, LabelKind, ModelKind
from src.http.server.call import Call

_POOLINGS: Final[dict[Pooling, Literal["cls", "mean", "last_token"]]] = {
    "first": "cls",
    "mean": "mean",
    "last": "last_token",
}


async def info(call: Call) -> None:
    """The model, how its texts become vectors, and the server's limits."""
    engine = await call.server.ready_engine()
    model, config = engine.model_info, engine.config
    recipes = (model.embedding, model.labels, model.scoring)
    longest = [recipe.max_tokens for recipe in recipes if recipe is not None]
    body = InfoBody(
        model_id=model.name,
        model_dtype=model.dtype,
        model_type=_kind(model),
        max_concurrent_requests=config.scheduler.max_waiting_requests,
        max_input_length=min(longest, default=model.max_model_len),
        max_batch_tokens=config.scheduler.max_num_batched_tokens,
        max_batch_requests=config.scheduler.max_num_seqs,
        max_client_batch_size=config.http.max_embedding_inputs,
        tokenization_workers=usable_cpus(),
        version=VERSION,
    )
    await call.answer(msgspec.json.encode(body))


def _kind(model: ModelInfo) -> ModelKind:
    if model.embedding is not None and not {"embed", "token_embed"}.isdisjoint(model.tasks):
        # A token's vector is pooled by nobody.
        pooling = _POOLINGS.get(model.embedding.pooling)
        return ModelKind() if pooling is None else ModelKind(embedding=EmbeddingKind(pooling))
    if model.labels is None:
        # One that scores without a head, by the logits of "yes" and "no", has no label's name.
        is_ranker = model.scoring is not None and "score" in model.tasks
        return ModelKind(reranker=_labels(("LABEL_0",))) if is_ranker else ModelKind()
    kind = _labels(model.labels.labels)
    return ModelKind(reranker=kind) if "score" in model.tasks else ModelKind(classifier=kind)


def _labels(names: Sequence[str]) -> LabelKind:
    return LabelKind(
        {str(number): name for number, name in enumerate(names)},
        {name: number for number, name in enumerate(names)},
    )
