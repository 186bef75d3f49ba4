"""What a layer keeps of a sequence between steps; the engine plans and allocates memory by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch

from src.core.blocks import Window
from src.ops.attention.cached_rows import CODES, row_size


class CacheScales(NamedTuple):
    """Scales of one layer: ``key = stored * keys``. 1.0 where the checkpoint has none."""

    keys: float = 1.0
    values: float = 1.0


class KVTensor(NamedTuple):
    """One tensor of a layer's memory; ``shape`` is of one token, or of one sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one token, or of one sequence."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKVSpec:
    """What one layer keeps of a sequence.

    Attributes
    ----------
    kind
        What it keeps, for the log.
    tensors
        In the order in which the layer's mixer takes them.
    window
        What a query sees.
    per
        Whether the tensors are of each token of context, and lie in blocks, or of the sequence as a
        whole, and lie in slots of their own.
    takes_codes
        Whether the layer's mixer can keep the rows of its tensors in 8 bits.
    lasts
        Whether a token's tensors are needed as long as its sequence, or only in the step that
        computes them. Then all layers use the same memory, one after the other.
    """

    kind: str
    tensors: tuple[KVTensor, ...]
    window: Window = None
    per: Literal["token", "sequence"] = "token"
    takes_codes: bool = False
    lasts: Literal["sequence", "step"] = "sequence"

    def in_codes(self, dtype: torch.dtype) -> LayerKVSpec:
        """The same with rows in 8 bits, see `ops.attention.cached_rows`."""
        tensors = tuple(
            KVTensor(one.name, (*one.shape[:-1], row_size(one.shape[-1], dtype)), dtype)
            for one in self.tensors
        )
        return replace(self, kind=f"{self.kind} in {CODES[dtype].name}", tensors=tensors)

    def block_shapes(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """Per tensor of each token: its shape within a block of ``block_size`` tokens."""
        return tuple((block_size, *tensor.shape) for tensor in self.tensors)

    def block_bytes(self, block_size: int) -> tuple[int, ...]:
        """Per tensor: bytes within a block of ``block_size`` tokens."""
        shapes = zip(self.tensors, self.block_shapes(block_size), strict=True)
        return tuple(math.prod(shape) * tensor.dtype.itemsize for tensor, shape in shapes)


class MixerSpec(Protocol):
    """What every mixer's static arguments tell, whatever its kind."""

    def kv(self) -> LayerKVSpec:
        """What the layer keeps of a sequence."""

    @property
    def deterministic(self) -> bool:
        """Whether a token's result must be the same bits in every batch."""


def keys_and_values(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: Window = None
) -> LayerKVSpec:
    """Memory of ordinary attention: a key and a value [num_kv_heads, head_dim] per token."""
    shape = (num_kv_heads, head_dim)
    tensors = tuple(KVTensor(name, shape, dtype) for name in ("keys", "values"))
    return LayerKVSpec("keys and values", tensors, window, takes_codes=True)


def keys_of_a_step(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> LayerKVSpec:
    """Memory of attention in which tokens see later ones: sequences are computed as a whole."""
    spec = keys_and_values(num_kv_heads, head_dim, dtype)
    return replace(spec, kind="keys and values of a step", takes_codes=False, lasts="step")


def kv_of(mixers: Sequence[Any], cache_dtype: torch.dtype | None = None) -> tuple[LayerKVSpec, ...]:
    """What each of a model's mixers keeps, in layer order.

    With ``cache_dtype`` those that can keep it in codes of that dtype.
    """
    layers = tuple(mixer.spec.kv() for mixer in mixers)
    if cache_dtype is None:
        return layers
    return tuple(one.in_codes(cache_dtype) if one.takes_codes else one for one in layers)
