"""``/v1/models``."""

from __future__ import annotations

import msgspec


class ModelCard(msgspec.Struct, kw_only=True):
    """One served name: of the model, or of an adapter, whose ``parent`` is the model.

    ``tasks`` are what it does, of `TASKS`.
    """

    id: str
    object: str = "model"
    created: int
    root: str
    max_model_len: int
    implementation: str
    owned_by: str = "slipstream"
    parent: str | None = None
    tasks: list[str]


class ModelList(msgspec.Struct, kw_only=True):
    """The answer of ``/v1/models``."""

    object: str = "list"
    data: list[ModelCard]
