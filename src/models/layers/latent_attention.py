"""The segment before latent attention, and the static arguments of its mixer.

DeepSeek-V2 (2024), section 2.1. Queries are projected at once, or through a small vector with a
norm of its own. Keys and values of all heads come from one latent per token, which is cached with
one rotated key that all heads share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src.models.layer_kv import KVTensor, LayerKVSpec
from src.models.layers.attention import apply_rope
from src.models.layers.linear import linear
from src.models.layers.norms import NormSpec, rms_norm
from src.models.weights.parameters import Weight


@dataclass(frozen=True, slots=True)
class LatentInSpec:
    """The static part of `latent_in`: this rank's heads, and numerics.

    Attributes
    ----------
    query_rank
        Size of the vector from which queries are made; None: they are made of the input.
    norm
        Norm of the residual stream; None: not normalized.
    inner_norm
        Norm of latents, and of the vector that queries are made of.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    rank: int
    query_rank: int | None
    norm: NormSpec | None
    inner_norm: NormSpec


class LatentInWeights(NamedTuple):
    """Weights of `latent_in`, in the model's dtype unless quantized; D = nope + rope."""

    norm: Tensor | None  # [H]
    down_weight: (
        Weight  # [query_rank, or Q D, + rank + rope, H], rows: queries, latent, rotated key
    )
    down_bias: Tensor | None  # of the same rows
    query_norm: Tensor | None  # [query_rank]
    query_weight: Weight | None  # [Q D, query_rank]
    latent_norm: Tensor  # [rank]
    rope_table: Tensor  # float32 [max_positions, rope], see `rope.rope_table`


@dataclass(frozen=True, slots=True)
class LatentMixerSpec:
    """Static arguments of one layer's latent attention: this rank's heads, and the scale.

    Attributes
    ----------
    rank, rope_dim
        Parts of the vector that is cached per token.
    deterministic
        See `attention.AttentionMixerSpec`.
    """

    num_heads: int
    value_dim: int
    rank: int
    rope_dim: int
    dtype: torch.dtype
    scale: float
    deterministic: bool

    def kv(self) -> LayerKVSpec:
        """See `layer_kv.MixerSpec`."""
        vector = KVTensor("latents", (self.rank + self.rope_dim,), self.dtype)
        return LayerKVSpec("latents", (vector,))


class LatentMixerWeights(NamedTuple):
    """Weights of the mixer."""

    up: Tensor  # [Q, nope + value, rank], see `ops.latent_attention`


def latent_in(
    spec: LatentInSpec, weights: LatentInWeights, residual: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute queries [T, Q, nope + rope] and vectors to cache [T, rank + rope] from [T, H]."""
    normed = residual
    if spec.norm is not None and weights.norm is not None:
        normed = rms_norm(residual, weights.norm, spec.norm)
    query_dim = spec.nope_dim + spec.rope_dim
    first = spec.num_heads * query_dim if spec.query_rank is None else spec.query_rank
    fused = linear(normed, weights.down_weight, weights.down_bias)
    query, latent, _ = fused.split((first, spec.rank, spec.rope_dim), dim=-1)
    # Torch's compiler asks about the number of tokens where a part of each row is viewed in another
    # shape. It does not ask about whole rows, or about a copy, which is fused into its readers.
    rotated = fused.unsqueeze(1)[..., first + spec.rank :]
    if weights.query_norm is not None and weights.query_weight is not None:
        query = linear(rms_norm(query, weights.query_norm, spec.inner_norm), weights.query_weight)
    else:
        query = query.clone(memory_format=torch.contiguous_format)
    cos_sin = weights.rope_table[positions].to(residual.dtype)
    by_head = query.unflatten(-1, (spec.num_heads, query_dim))
    plain, turned = by_head.split((spec.nope_dim, spec.rope_dim), dim=-1)
    key = apply_rope(rotated, cos_sin, spec.rope_dim)
    return (
        torch.cat((plain, apply_rope(turned, cos_sin, spec.rope_dim)), dim=-1),
        torch.cat((rms_norm(latent, weights.latent_norm, spec.inner_norm), key[:, 0]), dim=-1),
    )
