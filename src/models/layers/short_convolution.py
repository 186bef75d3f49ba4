"""The segments around a gated short convolution, and the static arguments of its mixer.

LFM2 (Liquid AI, 2025). A projection makes three vectors of each token's input. The product of two
is convolved along the sequence, channel by channel; the third is a factor of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src.models.layer_kv import KVTensor, LayerKVSpec
from src.models.layers.attention import add
from src.models.layers.linear import linear
from src.models.layers.norms import NormSpec, rms_norm
from src.models.weights.parameters import Weight


@dataclass(frozen=True, slots=True)
class ShortConvolutionInSpec:
    """The static part of `short_convolution_in`.

    Attributes
    ----------
    norm
        Norm of the residual stream; None: not normalized.
    """

    norm: NormSpec | None


class ShortConvolutionInWeights(NamedTuple):
    """Weights of `short_convolution_in`, in the model's dtype unless quantized."""

    norm: Tensor | None  # [H]
    weight: Weight  # [3 H, H], rows: factor of inputs, factor of outputs, inputs
    bias: Tensor | None  # [3 H]


@dataclass(frozen=True, slots=True)
class ShortConvolutionOutSpec:
    """The static part of `short_convolution_out`.

    Attributes
    ----------
    post_norm
        Of the output, before it is added.
    multiplier
        Factor of what is added to the residual stream.
    """

    post_norm: NormSpec | None
    multiplier: float


class ShortConvolutionOutWeights(NamedTuple):
    """Weights of `short_convolution_out`."""

    output_weight: Weight  # [H, H]
    output_bias: Tensor | None  # [H]
    post_norm: Tensor | None  # [H]


@dataclass(frozen=True, slots=True)
class ShortConvolutionMixerSpec:
    """Static arguments of the mixer of one layer.

    Attributes
    ----------
    channels
        Elements of a token that are convolved, each by itself.
    taps
        Tokens that the convolution sees, the token itself included.
    deterministic
        Whether a token's result must be the same bits in every batch; it always is.
    """

    channels: int
    taps: int
    dtype: torch.dtype
    deterministic: bool

    def kv(self) -> LayerKVSpec:
        """See `layer_kv.MixerSpec`."""
        inputs = KVTensor("inputs", (self.taps - 1, self.channels), self.dtype)
        return LayerKVSpec("inputs of convolutions", (inputs,), per="sequence")


class ShortConvolutionMixerWeights(NamedTuple):
    """Weights of the mixer."""

    weight: Tensor  # [K, C], of the convolution
    bias: Tensor | None  # [C]


def short_convolution_in(
    spec: ShortConvolutionInSpec, weights: ShortConvolutionInWeights, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute what is convolved and the factor of the result, both [T, H], from [T, H]."""
    normed = residual
    if spec.norm is not None and weights.norm is not None:
        normed = rms_norm(residual, weights.norm, spec.norm)
    before, behind, given = linear(normed, weights.weight, weights.bias).chunk(3, dim=-1)
    # What another call reads is contiguous. `contiguous()` asks whether there is one token.
    return before * given, behind.clone(memory_format=torch.contiguous_format)


def short_convolution_out(
    spec: ShortConvolutionOutSpec,
    weights: ShortConvolutionOutWeights,
    convolved: Tensor,
    factor: Tensor,
    residual: Tensor,
) -> Tensor:
    """Add the projected product of [T, H] and its factor [T, H] to the residual stream [T, H]."""
    added = linear(factor * convolved, weights.output_weight, weights.output_bias)
    return add(residual, added, weights.post_norm, spec.post_norm, spec.multiplier)
