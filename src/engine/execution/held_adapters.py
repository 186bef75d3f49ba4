"""The adapters that rows may have: tensors in host memory, and the slots they are copied to."""

from __future__ import annotations

from src.core.adapter import NO_ADAPTER
from src.core.errors import ShuttingDownError
from src.core.plan import RowInstall
from src.models.adapters.memory import AdapterMemory
from src.models.adapters.reader import AdapterWeights


class HeldAdapters:
    """Adapters by key. Plans name an adapter by its key, since its tensors do not travel.

    Parameters
    ----------
    memory
        The slots; ``None``: there are none.
    """

    def __init__(self, memory: AdapterMemory | None) -> None:
        self._memory = memory
        self._held: dict[int, AdapterWeights] = {}
        self._closed = False

    def close(self) -> None:
        """Release all tensors. No plan is executed any more."""
        self._closed = True
        self._memory = None
        self._held.clear()

    def hold(self, key: int, weights: AdapterWeights) -> None:
        """Keep an adapter that plans may name from now on. Any thread may call this.

        Raises
        ------
        ShuttingDownError
            It was closed.
        """
        if self._closed:
            raise ShuttingDownError("the engine was closed")
        self._held[key] = weights

    def drop(self, key: int) -> None:
        """Forget an adapter that no later plan names. Call it on the device thread."""
        self._held.pop(key, None)

    def bring(self, install: RowInstall) -> None:
        """Bring a row's adapter into its slot, unless it is there already.

        Raises
        ------
        LookupError
            The adapter is not held.
        """
        if install.adapter == NO_ADAPTER:
            return
        weights = self._held.get(install.adapter)
        if self._memory is None or weights is None:
            raise LookupError(f"adapter {install.adapter} is not loaded")
        self._memory.bring(install.adapter_slot, install.adapter, weights)
