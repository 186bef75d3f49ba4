"""``GET /info``: what clients of text-embeddings-inference ask of a server."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from src.core.cpus import usable_cpus
from src.core.request import Pooling
from src.core.version import VERSION
from src.http.protocol.inference import EmbeddingKind, InfoBody, ModelKind
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
    recipe = model.embedding
    kind = ModelKind() if recipe is None else ModelKind(EmbeddingKind(_POOLINGS[recipe.pooling]))
    body = InfoBody(
        model_id=model.name,
        model_dtype=model.dtype,
        model_type=kind,
        max_concurrent_requests=config.scheduler.max_waiting_requests,
        max_input_length=model.max_model_len if recipe is None else recipe.max_tokens,
        max_batch_tokens=config.scheduler.max_num_batched_tokens,
        max_batch_requests=config.scheduler.max_num_seqs,
        max_client_batch_size=config.http.max_embedding_inputs,
        tokenization_workers=usable_cpus(),
        version=VERSION,
    )
    await call.answer(msgspec.json.encode(body))
