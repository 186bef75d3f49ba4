"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Final

import msgspec

from src.engine.telemetry.status import ModelInfo
from src.http.call import Call
from src.http.protocol.models import ModelCard, ModelList
from src.http.server import served_name

_encode: Final = msgspec.json.Encoder().encode


async def list_models(call: Call) -> None:
    """Every name under which the model is served."""
    info = (await call.server.ready_engine()).model_info
    await call.answer(_encode(ModelList(data=[_card(info, name) for name in info.served_names])))


async def show_model(call: Call) -> None:
    """One of them."""
    info = (await call.server.ready_engine()).model_info
    name = served_name(info, call.scope["path_params"]["model"])
    await call.answer(_encode(_card(info, name)))


def _card(info: ModelInfo, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=info.created,
        root=info.name,
        max_model_len=info.max_model_len,
        implementation=info.implementation,
    )
