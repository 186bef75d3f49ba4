"""Root mean square normalization (Zhang and Sennrich 2019), and layer norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How a family normalizes.

    Attributes
    ----------
    offset
        Added to the weight: Gemma stores weights minus 1.
    scales_wide
        Whether the weight is multiplied in float32, before the result is rounded to the model's
        dtype. Otherwise it is multiplied after rounding.
    centered
        Whether the mean is subtracted first: a layer norm (Ba et al. 2016) without bias.
    """

    eps: float
    offset: float = 0.0
    scales_wide: bool = False
    centered: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is the norm of Llama, the only one that attention kernels support."""
        return self.offset == 0.0 and not self.scales_wide and not self.centered

    @property
    def neutral(self) -> float:
        """The weight that scales by 1."""
        return 1.0 - self.offset


def rms_norm(x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor:
    """Normalize over the last dimension, in float32: x [..., N], weight [..., N], to x's dtype."""
    wide = x.to(torch.float32)
    if spec.centered:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)
    if spec.scales_wide:
        return (normed * (weight.to(torch.float32) + spec.offset)).to(x.dtype)
    scale = weight + spec.offset if spec.offset else weight
    return scale * normed.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm with bias (Ba et al. 2016), in float32: x [..., N], weights [N], to x's dtype."""
    wide = x.to(torch.float32)
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.to(torch.float32) + bias.to(torch.float32)).to(x.dtype)


def unit(x: Tensor, eps: float) -> Tensor:
    """Scale vectors [..., N] to a root mean square of 1, in float32, to x's dtype."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
