"""Which kernels attend on a GPU: chosen once, when the model's shape is known."""

from __future__ import annotations

import logging

import torch

from src.core.config import DeviceSection
from src.core.errors import ConfigError
from src.models import Model
from src.ops import PAGED_ATTENTION
from src.ops.attention_libraries import (
    LIBRARIES,
    AttentionShape,
    LibraryUnavailableError,
    open_library,
)

logger = logging.getLogger(__name__)


def require_attention(section: DeviceSection, device: torch.device) -> None:
    """Refuse, before anything is loaded, to choose where there is no choice.

    Raises
    ------
    ConfigError
        ``device.attention`` names what only a GPU has.
    """
    if section.attention != "auto" and device.type != "cuda":
        raise ConfigError(
            f"device.attention = {section.attention!r} is for a GPU, the device is {device.type}"
        )


def choose_attention(section: DeviceSection, model: Model, block_size: int) -> str:
    """Have attention on the model's CUDA device served as ``device.attention`` says.

    Kernels are the process's: of several engines in one, the last that started has chosen.

    Returns
    -------
    str
        What serves, for the log.

    Raises
    ------
    ConfigError
        What it names is not there, or cannot serve this model.
    """
    passed_over = []
    for name in LIBRARIES if section.attention == "auto" else (section.attention,):
        if name == "triton":
            break
        try:
            kernel = open_library(name, model.spec.device, _shapes(model, block_size))
        except LibraryUnavailableError as error:
            if section.attention != "auto":
                raise ConfigError(f"device.attention = {name!r}: {name} {error}") from error
            passed_over.append(f"{name} {error}")
            continue
        finally:
            # What the trial took is free again when KV memory is sized.
            torch.cuda.empty_cache()
        PAGED_ATTENTION.install_cuda(kernel)
        logger.info("attention: %s serves prefill, triton decode", name)
        return f"{name} (prefill), triton (decode)"
    PAGED_ATTENTION.uninstall_cuda()
    name = PAGED_ATTENTION.load_cuda().name
    if section.attention not in ("auto", name):
        raise ConfigError(f"device.attention = {section.attention!r}: it is not installed")
    reasons = "".join(f"; {reason}" for reason in passed_over)
    logger.info("attention: %s serves prefill and decode%s", name, reasons)
    return name


def _shapes(model: Model, block_size: int) -> set[AttentionShape]:
    return {
        AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            block_size,
            spec.dtype,
            windowed=spec.window is not None,
        )
        for spec in (mixer.spec for mixer in model.program.mixers)
    }
