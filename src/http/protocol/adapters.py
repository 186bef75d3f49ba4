"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """An adapter to load; ``load_inplace`` replaces one of the same name."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """An adapter to unload."""

    lora_name: Name


class AdapterBody(msgspec.Struct, kw_only=True):
    """What was done to an adapter: ``loaded`` or ``unloaded``."""

    lora_name: str
    status: str
