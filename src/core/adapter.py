"""An adapter (LoRA) as requests and plans know it: no tensor, only what tells one from another."""

from __future__ import annotations

from typing import Final

import msgspec

NO_ADAPTER: Final = 0
"""The key of no adapter."""
NO_SLOT: Final = -1
"""The slot of a row without an adapter."""


class Adapter(msgspec.Struct, frozen=True):
    """A loaded adapter. One that is loaded again, under the same name or not, has another key.

    Attributes
    ----------
    key
        The engine's key for it, above 0 and never reused.
    name
        What requests call it.
    digest
        sha256 of its tensors and scales. The prefix cache tells adapters apart by it.
    """

    key: int
    name: str
    digest: bytes
