"""Counts the bytes of tensors that have shapes and no values: what a step would take on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# CUDA's allocator hands out multiples of this.
_GRANULE: Final = 512


class ShapeGauge(TorchDispatchMode):
    """Within it, the most bytes that tensors of one device took at the same time.

    Tensors that exist before are not counted, and memory that a kernel takes for itself is not
    seen.

    Attributes
    ----------
    peak
        In bytes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.peak = 0
        self._device_type = device.type
        self._taken = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`: called with every operation."""
        made = func(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in self._tensors((args, kwargs))}
        for tensor in self._tensors(made):
            storage = tensor.untyped_storage()
            # A view, or a tensor that was written to, has the memory of an argument.
            if id(storage) not in given and storage not in self._counted:
                self._count(storage)
        return made

    def _tensors(self, values: Any) -> list[Tensor]:
        return [
            one
            for one in tree_leaves(values)
            if isinstance(one, Tensor) and one.device.type == self._device_type
        ]

    def _count(self, storage: torch.UntypedStorage) -> None:
        taken = -(-storage.nbytes() // _GRANULE) * _GRANULE
        self._counted.add(storage)
        self._taken += taken
        self.peak = max(self.peak, self._taken)
        weakref.finalize(storage, self._release, taken).atexit = False

    def _release(self, taken: int) -> None:
        self._taken -= taken
