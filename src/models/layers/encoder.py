"""The segments of BERT's encoders: norms stand behind the sums, positions are embedded.

Devlin et al., "BERT" (2019). Attention stands between `project` and `attended_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from src.models.layers.activations import Activation, activate
from src.models.layers.linear import linear
from src.models.layers.norms import layer_norm
from src.models.weights.parameters import Weight
from src.ops.elementwise import by_token


@dataclass(frozen=True, slots=True)
class EncoderEmbeddingSpec:
    """The static part of `embed`.

    Attributes
    ----------
    eps
        Of the norm.
    first_position
        Row of the table of positions that a sequence's first token has.
    """

    eps: float
    first_position: int = 0


class EncoderEmbeddingWeights(NamedTuple):
    """Weights of `embed`; rows of the tables are added up."""

    tokens: Tensor  # [V, H]
    positions: Tensor  # [P, H]
    types: Tensor | None  # [kinds, H]; `embed` adds the first row to every token
    norm: Tensor  # [H]
    norm_bias: Tensor  # [H]


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """The static part of `project`: numbers of heads and their size."""

    num_heads: int
    head_dim: int


class ProjectWeights(NamedTuple):
    """Weights of `project`."""

    qkv_weight: Weight  # [3 Q D, H], rows: queries, keys, values
    qkv_bias: Tensor  # [3 Q D]


@dataclass(frozen=True, slots=True)
class SumNormSpec:
    """The static part of the segments that end in a norm of a sum.

    Attributes
    ----------
    eps
        Of the norm.
    activation
        Of the MLP; not used behind attention.
    deterministic
        Whether a token's result must be the same bits in every batch.
    """

    eps: float
    activation: Activation = "gelu"
    deterministic: bool = False


class AttendedWeights(NamedTuple):
    """Weights of `attended_norm`."""

    output_weight: Weight  # [H, Q D]
    output_bias: Tensor  # [H]
    norm: Tensor  # [H]
    norm_bias: Tensor  # [H]


class EncoderMLPWeights(NamedTuple):
    """Weights of `mlp_norm`."""

    up_weight: Weight  # [I, H]
    up_bias: Tensor  # [I]
    down_weight: Weight  # [H, I]
    down_bias: Tensor  # [H]
    norm: Tensor  # [H]
    norm_bias: Tensor  # [H]


def embed(
    spec: EncoderEmbeddingSpec,
    weights: EncoderEmbeddingWeights,
    input_ids: Tensor,
    positions: Tensor,
) -> Tensor:
    """Token ids and positions, int64 [T], to the stream [T, H]."""
    tokens = functional.embedding(input_ids, weights.tokens)
    if weights.types is not None:
        tokens = tokens + weights.types[0]
    summed = tokens + functional.embedding(positions + spec.first_position, weights.positions)
    return layer_norm(summed, weights.norm, weights.norm_bias, spec.eps)


def embed_pairs(
    spec: EncoderEmbeddingSpec,
    weights: EncoderEmbeddingWeights,
    input_ids: Tensor,
    positions: Tensor,
    token_types: Tensor,
) -> Tensor:
    """The same with the kind of each token, int64 [T]."""
    assert weights.types is not None
    tokens = functional.embedding(input_ids, weights.tokens)
    tokens = tokens + functional.embedding(token_types, weights.types)
    summed = tokens + functional.embedding(positions + spec.first_position, weights.positions)
    return layer_norm(summed, weights.norm, weights.norm_bias, spec.eps)


def project(spec: ProjectSpec, weights: ProjectWeights, stream: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values [T, Q, D] of the stream [T, H], slices of one projection."""
    heads, size = spec.num_heads, spec.num_heads * spec.head_dim
    qkv = linear(stream, weights.qkv_weight, weights.qkv_bias)
    query, key, value = qkv.split((size, size, size), dim=-1)
    shape = (heads, spec.head_dim)
    # Not `contiguous()`, which asks whether there is one token.
    query, key = (
        x.unflatten(-1, shape).clone(memory_format=torch.contiguous_format) for x in (query, key)
    )
    return query, key, value.unflatten(-1, shape)


def attended_norm(
    spec: SumNormSpec, weights: AttendedWeights, attended: Tensor, stream: Tensor
) -> Tensor:
    """Project the attention output [T, Q D], add it to the stream [T, H], normalize the sum."""
    added = linear(attended, weights.output_weight, weights.output_bias)
    return layer_norm(added + stream, weights.norm, weights.norm_bias, spec.eps)


def mlp_norm(spec: SumNormSpec, weights: EncoderMLPWeights, stream: Tensor) -> Tensor:
    """Add the MLP's output to the stream [T, H], and normalize the sum."""
    inner = linear(stream, weights.up_weight, weights.up_bias)
    if spec.deterministic:
        inner = by_token(lambda x: activate(x, spec.activation), inner)
    else:
        inner = activate(inner, spec.activation)
    added = linear(inner, weights.down_weight, weights.down_bias)
    return layer_norm(added + stream, weights.norm, weights.norm_bias, spec.eps)


def keep(spec: None, weights: tuple[()], stream: Tensor) -> Tensor:
    """The stream [T, H] as hidden states: its last norm was that of the last layer."""
    return stream.clone(memory_format=torch.contiguous_format)


def widen(spec: None, weights: tuple[()], hidden: Tensor) -> Tensor:
    """Hidden states [S, H] in float32, for a model without a head."""
    return hidden.to(torch.float32)
