"""What a caller may choose when a model is loaded or outlined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from src.core.config import Config
from src.models.adapters.memory import AdapterRoom
from src.ops.projections.rounding import Method

LoadFormat: TypeAlias = Literal["auto", "dummy"]
Progress: TypeAlias = Callable[[int, int], None]
"""(bytes read, total bytes); called on any thread, one call at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint becomes a model.

    Attributes
    ----------
    dtype
        ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's own.
    device
        Where parameters live, or where those of an outline would. None: the CPU.
    load_format
        ``dummy`` fills parameters from ``seed`` and reads no file but ``config.json``.
    seed
        Of dummy weights.
    max_model_len
        Longest sequence in tokens; None: the length that the model is made for.
    quantization
        Of the projections' weights after reading, see `methods.formats_of`.
    group_size
        Of ``int4``, in inputs.
    rounds_inputs
        Whether quantized projections also round their inputs; None: if the model is bfloat16.
    deterministic
        Whether a token's result must be the same bits in every batch.
    adapters
        Slots for adapters; None: there are none.
    taps
        See `ProgramBuilder`.
    """

    dtype: str = "auto"
    device: torch.device | None = None
    load_format: LoadFormat = "auto"
    seed: int = 0
    max_model_len: int | None = None
    quantization: Method | None = None
    group_size: int = 32
    rounds_inputs: bool | None = False
    deterministic: bool = False
    adapters: AdapterRoom | None = None
    taps: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, config: Config, rounds_inputs: bool | None, adapters: AdapterRoom | None
    ) -> LoadOptions:
        """What a configuration asks for, on the CPU."""
        model = config.model
        return cls(
            dtype=model.dtype,
            load_format=model.load_format,
            seed=model.seed,
            max_model_len=model.max_model_len,
            quantization=model.quantization,
            group_size=model.quantization_group_size,
            rounds_inputs=rounds_inputs,
            deterministic=model.deterministic,
            adapters=adapters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHooks:
    """What a caller does while a model is loaded.

    Attributes
    ----------
    progress
        Called as weights are read. None: a progress bar, if standard error is a terminal.
    before_each_matrix
        Called before each matrix is quantized.
    when_allocated
        Called with the model when all parameters are allocated, before any is filled.
    """

    progress: Progress | None = None
    before_each_matrix: Callable[[], None] = lambda: None
    when_allocated: Callable[[Any], None] = lambda model: None
