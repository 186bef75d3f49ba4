"""How a layer's attention scores are computed: one value that is passed down to the kernel.

A new modifier of the scores is a new field here, and code in the reference and the kernels. The
functions in between pass the value on without knowing its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """How one layer attends.

    Attributes
    ----------
    scale
        Factor of the scores.
    cap
        Soft cap of the scaled scores: they become `cap * tanh(score / cap)` before the mask, as in
        Gemma 2. None for no cap.
    window
        Number of keys up to its own that a token sees, itself included (sliding window). None for
        all.
    chunk
        A token sees only keys of its own chunk of this many tokens, counted from the sequence's
        first (Llama 4). None for no chunks.
    ahead
        Number of keys behind its own that a token sees: those of its sequence that the cache has,
        this step's included. `ALL_AHEAD` for all, as in an encoder. None for none: attention is
        causal. With `window`, it is a window of two sides.
    sinks
        [num_heads] float32, one logit per query head. It is added to the softmax's denominator
        only, as in gpt-oss. None for no sinks.

    Raises
    ------
    ValueError
        `cap`, `window`, `chunk` or `ahead` is out of range, or `sinks` is not a float32 vector; or
        there are chunks and keys ahead at once.
    """

    PARTS: ClassVar[tuple[tuple[str, str], ...]] = (("sinks", "Tensor?"), ("scalars", "float[]"))
    """Its flat arguments in torch's schema, see `records.NestedField`."""

    scale: float
    cap: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: Tensor | None = None
    ahead: int | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"expected cap above 0, got {self.cap}")
        for name in ("window", "chunk", "ahead"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"expected {name} of at least 1, got {size}")
        if self.ahead is not None and (self.ahead > ALL_AHEAD or self.chunk is not None):
            raise ValueError(f"expected ahead up to {ALL_AHEAD}, without chunks, got {self.ahead}")
        sinks = self.sinks
        if sinks is not None and (sinks.dim() != 1 or sinks.dtype != torch.float32):
            raise ValueError(
                f"expected sinks float32 [num_heads], got {sinks.dtype} {tuple(sinks.shape)}"
            )

    @property
    def features(self) -> frozenset[str]:
        """Fields other than `scale` that are set; a kernel must support all of them."""
        return frozenset(name for name in FEATURES if getattr(self, name) is not None)

    def first_visible(self, position: int) -> int:
        """The position of the first key that the token at `position` sees."""
        in_window = 0 if self.window is None else position - self.window + 1
        in_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, in_window, in_chunk)

    def visible_end(self, position: int, seq_len: int) -> int:
        """The position behind the last key that the token at `position` of so many sees."""
        return min(seq_len, position + 1 + (self.ahead or 0))

    def scalars(self) -> list[float]:
        """All fields except tensors, in the order of the op's schema."""
        counts = (self.window, self.chunk, self.ahead)
        return [self.scale, self.cap or 0.0, *(float(count or 0) for count in counts)]

    def parts(self) -> tuple[Tensor | None, list[float]]:
        """The flat arguments."""
        return self.sinks, self.scalars()

    @classmethod
    def of(cls, sinks: Tensor | None, scalars: Sequence[float]) -> AttentionSpec:
        """The spec from the op's arguments `sinks` and `scalars`."""
        scale, cap, *counts = scalars
        window, chunk, ahead = (int(count) or None for count in counts)
        return cls(scale, cap or None, window, chunk, sinks, ahead)


ALL_AHEAD = 2**30
"""More keys than any sequence has, and in sum with a position still an int32."""

FEATURES = frozenset({"cap", "window", "chunk", "sinks", "ahead"})
"""Every field that a kernel may or may not support."""
