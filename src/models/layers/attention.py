"""The segments before and after attention, and the static arguments of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src.core.blocks import Chunk, Window
from src.distributed import Group
from src.models.layer_kv import LayerKVSpec, keys_and_values, keys_of_a_step
from src.models.layers.activations import sigmoid
from src.models.layers.linear import linear, row_parallel_linear
from src.models.layers.norms import NormSpec, rms_norm, unit
from src.models.weights.parameters import Weight
from src.ops.attention.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Temperature:
    """A factor of queries: ``1 + growth * ln(1 + floor((position + 1) / span))``, as in Llama 4.

    Attributes
    ----------
    span
        Tokens after which it grows.
    """

    span: int
    growth: float

    def of(self, positions: Tensor) -> Tensor:
        """The factors of tokens at positions [T], in float32."""
        spans = ((positions.to(torch.float32) + 1.0) / self.span).floor()
        return spans.log1p() * self.growth + 1.0


@dataclass(frozen=True, slots=True)
class AttentionInSpec:
    """The static part of `attention_in`: this rank's heads, and numerics.

    Attributes
    ----------
    norm
        Norm of the residual stream; None: not normalized.
    qk_norm
        Norm of queries and keys: each head by itself, or with ``whole`` all heads together.
    rotary_dim
        Elements of a head that are rotated, as pairs (i, i + rotary_dim / 2). 0: none.
    rotated_norm
        Norm without weights of rotated queries and keys, each head by itself.
    temperature
        A factor of queries.
    has_gate
        Whether the projection has rows of an output gate, behind those of queries.
    deterministic
        Whether a token's result must be the same bits in every batch, see docs/determinism.md.
    sections
        Of positions with several axes [T, axes]: how many pairs of a head each section rotates, by
        the axes in turn. Empty: positions have one axis [T].
    leaves_rotation
        Whether the mixer normalizes and rotates queries and keys (`ops.rotate_and_cache`). The
        segment then returns them as slices of the projection.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm: NormSpec | None
    qk_norm: NormSpec | None
    whole: bool
    rotary_dim: int
    rotated_norm: NormSpec | None
    temperature: Temperature | None
    leaves_rotation: bool
    has_gate: bool = False
    deterministic: bool = False
    sections: tuple[int, ...] = ()


class AttentionInWeights(NamedTuple):
    """Weights of `attention_in`, in the model's dtype unless quantized."""

    norm: Tensor | None  # [H]
    qkv_weight: Weight  # [(Q + 2 K) D, H], rows: queries, perhaps gates, keys, values
    qkv_bias: Tensor | None  # [(Q + 2 K) D]
    q_norm: Tensor | None  # [D]; [Q, D] with weights of each head; [Q D] for all heads together
    k_norm: Tensor | None  # [D], [K, D] or [K D]
    rope_table: Tensor | None  # float32 [max_positions, rotary_dim], see `rope.rope_table`


@dataclass(frozen=True, slots=True)
class AttentionOutSpec:
    """The static part of `attention_out`; ``post_norm`` normalizes the output before the sum."""

    post_norm: NormSpec | None
    multiplier: float
    group: Group


class AttentionOutWeights(NamedTuple):
    """Weights of `attention_out`."""

    output_weight: Weight  # [H, Q D]
    output_bias: Tensor | None  # [H]
    post_norm: Tensor | None  # [H]


@dataclass(frozen=True, slots=True)
class AttentionMixerSpec:
    """Static arguments of one layer's attention: this rank's heads, and how scores are computed.

    Attributes
    ----------
    scale, window, cap, chunk
        See `config.AttentionConfig`; resolved.
    ahead
        Keys behind its own that a token sees, see `ops.attention.spec.AttentionSpec`. With any, a
        prompt is computed in one step, as a whole: its keys are needed in no other.
    dtype
        Of keys and values.
    rotates
        The norm of queries and keys if the mixer rotates them (see
        `AttentionInSpec.leaves_rotation`); the mixer uses its epsilon. None: it does not rotate.
    deterministic
        Whether a token's result must be the same bits in every batch, see docs/determinism.md.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int | None
    cap: float | None
    rotates: NormSpec | None
    deterministic: bool
    chunk: int | None = None
    ahead: int | None = None

    def kv(self) -> LayerKVSpec:
        """See `layer_kv.MixerSpec`."""
        if self.ahead is not None:
            return keys_of_a_step(self.num_kv_heads, self.head_dim, self.dtype)
        window: Window = self.window
        if window is None and self.chunk is not None:
            window = Chunk(self.chunk)
        return keys_and_values(self.num_kv_heads, self.head_dim, self.dtype, window)

    def attention(self, weights: AttentionMixerWeights) -> AttentionSpec:
        """The specification that attention ops take."""
        return AttentionSpec(
            self.scale, self.cap, self.window, self.chunk, weights.sinks, self.ahead
        )


class AttentionMixerWeights(NamedTuple):
    """Weights of the mixer: attention sinks, and norms and table if it rotates."""

    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None  # [D]
    rope_table: Tensor | None = None  # float32 [max_positions, D]
    sinks: Tensor | None = None  # float32 [Q], see `AttentionSpec`


def attention_in(
    spec: AttentionInSpec, weights: AttentionInWeights, residual: Tensor, positions: Tensor
) -> tuple[Tensor, ...]:
    """Compute queries [T, Q, D], keys and values [T, K, D] from the residual stream [T, H].

    With `has_gate` also the factors of the output, [T, Q D].

    Queries and keys are contiguous and rotated. Values are a slice of the fused projection, with a
    token stride of (Q + 2 K) D. With `leaves_rotation` all three are slices.
    """
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    normed = residual
    if spec.norm is not None and weights.norm is not None:
        normed = rms_norm(residual, weights.norm, spec.norm)
    qkv = linear(normed, weights.qkv_weight, weights.qkv_bias)
    gates = heads if spec.has_gate else 0
    fused = qkv.unflatten(-1, (heads + gates + 2 * kv_heads, head_dim))
    query, _, key, value = fused.split((heads, gates, kv_heads, kv_heads), dim=1)
    # Sliced from the flat projection, because flattening the heads again would make the compiler
    # add a guard on the number of tokens.
    sizes = [count * head_dim for count in (heads, gates, kv_heads, kv_heads)]
    flat_query, flat_gate, flat_key, _ = qkv.split(sizes, dim=-1)
    factors = (sigmoid(flat_gate, spec.deterministic),) if gates else ()
    if spec.leaves_rotation:
        return query, key, value, *factors
    if spec.whole:
        flat_query, flat_key = _normed(spec, weights, flat_query, flat_key)
        query = flat_query.unflatten(-1, (heads, head_dim))
        key = flat_key.unflatten(-1, (kv_heads, head_dim))
    else:
        query, key = _normed(spec, weights, query, key)
    if weights.rope_table is None:
        # Not `contiguous()`, which asks whether there is one token.
        query, key = (x.clone(memory_format=torch.contiguous_format) for x in (query, key))
    else:
        cos_sin = weights.rope_table[positions].to(query.dtype)
        if spec.sections:
            cos_sin = by_axis(cos_sin, spec.sections)
        query = apply_rope(query, cos_sin, spec.rotary_dim)
        key = apply_rope(key, cos_sin, spec.rotary_dim)
    if spec.rotated_norm is not None:
        query, key = unit(query, spec.rotated_norm.eps), unit(key, spec.rotated_norm.eps)
    if spec.temperature is not None:
        temperature = spec.temperature.of(positions)
        query = (query * temperature[:, None, None]).to(query.dtype)
    return query, key, value, *factors


def _normed(
    spec: AttentionInSpec, weights: AttentionInWeights, query: Tensor, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalized over their last dimension if the spec says so."""
    if spec.qk_norm is None or weights.q_norm is None or weights.k_norm is None:
        return query, key
    return (
        rms_norm(query, weights.q_norm, spec.qk_norm),
        rms_norm(key, weights.k_norm, spec.qk_norm),
    )


def scale_attended(spec: None, weights: tuple[()], attended: Tensor, factors: Tensor) -> Tensor:
    """Multiply the attention output [T, Q D] by the factors that `attention_in` gave."""
    return attended * factors


def attention_out(
    spec: AttentionOutSpec, weights: AttentionOutWeights, attended: Tensor, residual: Tensor
) -> Tensor:
    """Add the projected attention output [T, Q D] to the residual stream [T, H]."""
    added = row_parallel_linear(attended, weights.output_weight, weights.output_bias, spec.group)
    return add(residual, added, weights.post_norm, spec.post_norm, spec.multiplier)


def add(
    residual: Tensor,
    added: Tensor,
    norm: Tensor | None,
    norm_spec: NormSpec | None,
    multiplier: float,
) -> Tensor:
    """Add a block's output to the residual stream, after its optional norm and factor."""
    if norm is not None and norm_spec is not None:
        added = rms_norm(added, norm, norm_spec)
    return residual + (added if multiplier == 1.0 else added * multiplier)


def by_axis(cos_sin_tar: Tensor, sections: tuple[int, ...]) -> Tensor:
    """Choose the angles of each section from one axis: [T, R] from [T, axes, R].

    Source: P. Wang et al., "Qwen2-VL" (2024), section 2.1.

    Parameters
    ----------
    cos_sin_tar
        Cosines and sines of every axis's angles.
    sections
        Numbers of pairs, in sum R / 2; the i-th follows axis i modulo axes.
    """
    axes = cos_sin_tar.shape[1]
    chosen = [
        part[:, index % axes]
        for half in cos_sin_tar.chunk(2, dim=-1)
        for index, part in enumerate(half.split(sections, dim=-1))
    ]
    return torch.cat(chosen, dim=-1)


def apply_rope(x_thd: Tensor, cos_sin_tr: Tensor, rotary_dim: int) -> Tensor:
    """Rotate pairs (i, i + R / 2) of the first R elements of each head by its token's angles.

    Parameters
    ----------
    x_thd
        Queries or keys, [T, heads, D].
    cos_sin_tr
        Rows of the RoPE table for the tokens' positions, [T, R] in x's dtype.
    rotary_dim
        R, at most D.
    """
    cos, sin = cos_sin_tr.unsqueeze(1).chunk(2, dim=-1)
    rotated, rest = x_thd, None
    if rotary_dim < x_thd.shape[-1]:
        rotated, rest = x_thd[..., :rotary_dim], x_thd[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(parts if rest is None else [*parts, rest], dim=-1)
