"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Final

import msgspec

from src.engine.client import AsyncEngine
from src.http.protocol.models import ModelCard, ModelList
from src.http.server.call import Call
from src.http.server.state import served_name

_encode: Final = msgspec.json.Encoder().encode


async def list_models(call: Call) -> None:
    """Every name under which the model is served, and every adapter."""
    engine = await call.server.ready_engine()
    names = (*engine.model_info.served_names, *engine.adapters.loaded)
    await call.answer(_encode(ModelList(data=[_card(engine, name) for name in names])))


async def show_model(call: Call) -> None:
    """One of them."""
    engine = await call.server.ready_engine()
    name = served_name(engine, call.scope["path_params"]["model"])
    await call.answer(_encode(_card(engine, name)))


def _card(engine: AsyncEngine, name: str) -> ModelCard:
    info, adapter = engine.model_info, engine.adapters.loaded.get(name)
    return ModelCard(
        id=name,
        created=info.created if adapter is None else adapter.created,
        # Not where the files are: that is no client's business.
        root=info.name if adapter is None else name,
        max_model_len=info.max_model_len,
        implementation=info.implementation,
        parent=None if adapter is None else info.name,
        # An adapter changes what the model computes, not what it can do.
        tasks=list(info.tasks),
    )
