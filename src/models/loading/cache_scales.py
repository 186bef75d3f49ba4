"""Scales of 8-bit keys and values that checkpoints bring, one number per layer and kind."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from src.core.errors import ModelLoadError
from src.models.checkpoint import StoredTensor, TensorReader
from src.models.layer_kv import CacheScales
from src.models.weights.parameters import NUMBERS

# Tools write them beside the projections or within them. `kv_scale` is of both. Scales of queries
# and probabilities are of kernels that compute attention itself in 8 bits; nothing reads them.
_NAME = re.compile(
    r"\.(?P<layer>\d{1,9})\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?P<kind>kv|k|v|q|prob)_scale|(?P<of>[kv])_proj\.output_scale)$"
)


def scale_names(stored: Mapping[str, StoredTensor]) -> set[str]:
    """The tensors of a checkpoint that are scales of keys and values, or go with them."""
    return {name for name in stored if _NAME.search(name)}


def read_scales(stored: Mapping[str, StoredTensor]) -> dict[int, CacheScales]:
    """The scales of each layer that has some.

    Raises
    ------
    ModelLoadError
        One is not a positive number.
    """
    reader, scales = TensorReader(lambda count: None), dict[int, CacheScales]()
    for name in sorted(scale_names(stored)):
        match = _NAME.search(name)
        assert match is not None
        kind, layer = match["kind"] or match["of"], int(match["layer"])
        number = _number(reader, stored[name])
        known = scales.get(layer, CacheScales())
        if kind in ("k", "kv"):
            known = known._replace(keys=number)
        if kind in ("v", "kv"):
            known = known._replace(values=number)
        if kind in ("k", "v", "kv"):
            scales[layer] = known
    return scales


def _number(reader: TensorReader, stored: StoredTensor) -> float:
    if stored.shape not in ((), (1,)) or stored.dtype not in NUMBERS:
        raise ModelLoadError(
            f"{stored.file}: {stored.name} must be one number, got {stored.dtype} of shape "
            f"{list(stored.shape)}"
        )
    value = torch.empty(stored.shape, dtype=torch.float32)
    reader.read(stored, value)
    number = value.item()
    if not 0 < number < float("inf"):
        raise ModelLoadError(f"{stored.file}: {stored.name} must be positive, got {number}")
    return number
