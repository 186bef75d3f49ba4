"""What becomes of a layer's scores: one value for the whole way to a kernel.

A further modifier is a field here, and what the reference and the kernels make of it: signatures in
between pass the value on and do not know its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """How one layer attends.

    Attributes
        scale: Factor of the scores.
        cap: Bound of the scaled scores, which become `cap * tanh(score / cap)` before the mask, as
            in Gemma 2; None for none.
        window: Keys that a token sees, itself included; None for all.
        sinks: [num_heads] float32, a logit of each query head that takes part in the softmax's
            denominator and in nothing else, as in gpt-oss; None for none.

    Raises
        ValueError: A field is out of range, or `sinks` is not a contiguous float32 vector.
    """

    scale: float
    cap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"expected cap above 0, got {self.cap}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"expected window of at least 1, got {self.window}")
        sinks = self.sinks
        if sinks is not None and (sinks.dim() != 1 or sinks.dtype != torch.float32):
            raise ValueError(
                f"expected sinks float32 [num_heads], got {sinks.dtype} {tuple(sinks.shape)}"
            )

    @property
    def features(self) -> frozenset[str]:
        """Fields beside `scale` that are in use: what a kernel must honour to serve this layer."""
        return frozenset(
            name for name in ("cap", "window", "sinks") if getattr(self, name) is not None
        )

    def scalars(self) -> list[float]:
        """All fields but tensors, as the op's schema has them."""
        return [self.scale, self.cap or 0.0, float(self.window or 0)]

    @classmethod
    def of(cls, sinks: Tensor | None, scalars: Sequence[float]) -> AttentionSpec:
        """From the op's arguments."""
        scale, cap, window = scalars
        return cls(scale, cap or None, int(window) or None, sinks)


FEATURES = frozenset({"cap", "window", "sinks"})
"""Every field that a kernel may or may not honour."""
