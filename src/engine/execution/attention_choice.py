"""Chooses the attention backend on a GPU, once per engine, when the model's shape is known."""

from __future__ import annotations

import logging

import torch

from src.core.config import DeviceSection
from src.core.errors import ConfigError
from src.engine.execution.mixers import MIXERS
from src.models import ServedModel
from src.ops import PAGED_ATTENTION
from src.ops.attention.backend import AttentionBackend, AttentionKernel
from src.ops.attention.cached_rows import CODES
from src.ops.attention.libraries import (
    LIBRARIES,
    AttentionShape,
    LibraryUnavailableError,
    NothingHonouredError,
    open_library,
)

logger = logging.getLogger(__name__)


def require_attention(section: DeviceSection, device: torch.device) -> None:
    """Refuse a ``device.attention`` that the device does not have, before anything is loaded.

    Raises
    ------
    ConfigError
        ``device.attention`` names a backend that only a GPU has.
    """
    if section.attention != "auto" and device.type != "cuda":
        raise ConfigError(
            f"device.attention = {section.attention!r} is for a GPU, the device is {device.type}"
        )


def choose_attention(
    section: DeviceSection, model: ServedModel, block_size: int
) -> tuple[AttentionBackend, str]:
    """Choose the attention backend for the model's CUDA device, as ``device.attention`` says.

    Layers that a library cannot compute, for example because it has no soft cap, use Triton.

    Returns
    -------
    tuple
        The engine's own backend object, and a description for the log.

    Raises
    ------
    ConfigError
        The named library is not installed, or cannot serve this model or its KV cache.
    """
    if model.cache_dtype is not None and section.attention not in ("auto", "triton"):
        raise ConfigError(
            f"device.attention = {section.attention!r}: only Triton's kernels read a KV cache in "
            f"{CODES[model.cache_dtype].name} (cache.dtype)"
        )
    own = PAGED_ATTENTION.load_cuda()
    device_kernel = AttentionKernel(own.name, own.run)
    passed_over = []
    shapes = {shape for shape in _shape_of_each(model, block_size) if shape is not None}
    names = LIBRARIES if section.attention == "auto" else (section.attention,)
    for name in names if shapes else ():
        if name == "triton":
            break
        try:
            kernel = open_library(name, model.spec.device, shapes)
        except LibraryUnavailableError as error:
            if section.attention != "auto" and not isinstance(error, NothingHonouredError):
                raise ConfigError(f"device.attention = {name!r}: {name} {error}") from error
            passed_over.append(f"{name} {error}")
            continue
        finally:
            # The trial's memory must be free again before KV memory is sized.
            torch.cuda.empty_cache()
        backend = AttentionBackend(kernel, device_kernel)
        served = [
            shape is not None and backend.kernel_for(shape.features) is kernel
            for shape in _shape_of_each(model, block_size)
        ]
        where = "" if all(served) else f" in {sum(served)} of {len(served)} layers"
        logger.info("attention: %s serves prefill%s, %s decode", name, where, own.name)
        return backend, f"{name} (prefill{where}), {own.name} (decode)"
    if section.attention == "triton" != own.name:
        raise ConfigError(f"device.attention = {section.attention!r}: it is not installed")
    reasons = "".join(f"; {reason}" for reason in passed_over)
    logger.info("attention: %s serves prefill and decode%s", own.name, reasons)
    return AttentionBackend(device_kernel), own.name


def _shape_of_each(model: ServedModel, block_size: int) -> list[AttentionShape | None]:
    if model.cache_dtype is not None:
        # Libraries have factors of a tensor or of a head, not of a token and head.
        return [None] * len(model.mixers)
    layers = zip(model.mixers, model.mixer_weights, strict=True)
    return [
        MIXERS[mixer.kind].shape_for_libraries(mixer, weights, block_size)
        for mixer, weights in layers
    ]
