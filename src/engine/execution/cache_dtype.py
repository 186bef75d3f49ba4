"""In what keys and values are kept: ``cache.dtype``."""

from __future__ import annotations

import logging
from types import MappingProxyType

import torch

from src.core.config import CacheSection
from src.core.errors import ConfigError
from src.models import ServedModel
from src.models.layer_kv import kv_of
from src.ops.attention.cached_rows import CODES

logger = logging.getLogger(__name__)

# `fp8_e4m3` is another name of `fp8`.
_DTYPES = MappingProxyType(
    {codes.name: dtype for dtype, codes in CODES.items()} | {"fp8_e4m3": torch.float8_e4m3fn}
)


def set_cache_dtype(section: CacheSection, model: ServedModel) -> None:
    """Let a model keep keys and values as ``cache.dtype`` says. Call before memory is sized.

    Recurrent states keep their dtype: they are read and written back at every token.

    Raises
    ------
    ConfigError
        The model keeps something else of each token, such as latents.
    """
    if section.dtype == "auto":
        return
    layers = kv_of(model.mixers)
    kept = {one.kind for one in layers if one.per == "token" and not one.takes_codes}
    if kept:
        raise ConfigError(
            f"cache.dtype = {section.dtype!r} is for keys and values, this model keeps "
            f"{' and '.join(sorted(kept))}: leave it at 'auto'"
        )
    model.cache_dtype = _DTYPES[section.dtype]


def cache_dtype_of(model: ServedModel) -> str:
    """The name of what keys and values are kept in, for readers."""
    if model.cache_dtype is not None:
        return CODES[model.cache_dtype].name
    return str(model.spec.dtype).removeprefix("torch.")


def log_cache_dtype(model: ServedModel) -> None:
    """Tell how many more tokens fit than in the model's dtype, if that is not used."""
    if model.cache_dtype is None:
        return
    plain, coded = (
        sum(sum(one.block_bytes(1)) for one in layers if one.per == "token")
        for layers in (kv_of(model.mixers), model.kv_cache_spec())
    )
    logger.info(
        "KV cache in %s: %.2f times the tokens of %s in the same memory, %d bytes per token "
        "instead of %d",
        cache_dtype_of(model),
        plain / coded,
        str(model.spec.dtype).removeprefix("torch."),
        coded,
        plain,
    )
