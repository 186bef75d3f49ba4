"""The segments at both ends of a decoder: embedding, final norm and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src.models.layers.linear import capped, linear
from src.models.layers.norms import NormSpec, rms_norm
from src.models.weights.parameters import Weight


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Factor of the embedding, a number of the model's dtype."""

    multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Soft cap and factor of the logits."""

    cap: float | None = None
    multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class TappedHeadSpec:
    """A head whose input has other tensors behind the hidden states of this size."""

    head: HeadSpec
    hidden_size: int


class EmbeddingWeights(NamedTuple):
    """[V, H]."""

    embedding: Tensor


class NormWeights(NamedTuple):
    """[H]."""

    norm: Tensor


class HeadWeights(NamedTuple):
    """[V, H]."""

    head: Weight


def embed(spec: EmbeddingSpec, weights: EmbeddingWeights, input_ids: Tensor) -> Tensor:
    """Token ids int64 [T] to the residual stream [T, H]."""
    residual = torch.nn.functional.embedding(input_ids, weights.embedding)
    return residual if spec.multiplier == 1.0 else residual * spec.multiplier


def embed_or_take(
    spec: EmbeddingSpec,
    weights: EmbeddingWeights,
    input_ids: Tensor,
    embeddings: Tensor,
    is_embedded: Tensor,
) -> Tensor:
    """Embeddings [T, H] of the token ids [T], or those that are given, where `is_embedded` [T]."""
    return torch.where(is_embedded[:, None] != 0, embeddings, embed(spec, weights, input_ids))


def final_norm(spec: NormSpec, weights: NormWeights, residual: Tensor) -> Tensor:
    """The residual stream [T, H], normalized: behind the last layer, hidden states."""
    return rms_norm(residual, weights.norm, spec)


def tap(spec: None, weights: tuple[()], residual: Tensor) -> Tensor:
    """A copy of the residual stream [T, H], which later layers overwrite."""
    return residual.clone()


def final_norm_and_taps(
    spec: NormSpec, weights: NormWeights, residual: Tensor, *taps: Tensor
) -> Tensor:
    """Hidden states [T, H], and behind them what was tapped: [T, (1 + taps) H]."""
    return torch.cat((final_norm(spec, weights, residual), *taps), dim=-1)


def head(spec: HeadSpec, weights: HeadWeights, hidden: Tensor) -> Tensor:
    """Vocabulary scores, float32 [S, V], of selected hidden states [S, H]."""
    scores = linear(hidden, weights.head)
    if spec.multiplier != 1.0:
        scores = scores * spec.multiplier
    # The cap is computed in the model's dtype, like in the reference.
    return capped(scores, spec.cap).to(torch.float32)


def tapped_head(spec: TappedHeadSpec, weights: HeadWeights, hidden: Tensor) -> Tensor:
    """See `head`; of the tensors that `final_norm_and_taps` gives, [S, (1 + taps) H]."""
    own = hidden[:, : spec.hidden_size].clone(memory_format=torch.contiguous_format)
    return head(spec.head, weights, own)
