"""A dense decoder as three regions around attention, and the head.

Between two attention calls lies the rest of one layer and the start of the next. That *middle*
region is the same function for every layer, so compiling it once serves any depth:

    first    embedding, and layer 0 up to attention
    middle   layer i after attention, and layer i + 1 up to attention
    last     the last layer after attention, and the final norm
    logits   rows of hidden states to vocabulary scores

The functions are pure: weights are arguments, the specification is static and hashable, and nothing
in them depends on data. Between calls only the number of tokens varies (`TOKEN_ARGUMENTS`); with
that dimension symbolic each region is compiled once.
Shape suffixes are those of `layers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from src.distributed import Group
from src.models.layers import apply_rope, linear, rms_norm, row_parallel_linear, silu_and_mul
from src.models.quantization import Weight


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """The static part of the regions: this rank's head counts, and numerics."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    group: Group
    # Whether a token's bits may depend on nothing but its own inputs, see docs/determinism.md.
    deterministic: bool = False
    # Whether queries, keys and values leave the regions as the projection gives them: then
    # `ops.rotate_and_cache`, which whoever attends calls first, does the rest.
    rotates_in_op: bool = False


class PreAttention(NamedTuple):
    """Weights of a layer up to attention, in the model's dtype unless quantized."""

    input_norm: torch.Tensor  # [H]
    qkv_weight: Weight  # [(Q + 2 K) D, H], rows: queries, keys, values
    qkv_bias: torch.Tensor | None  # [(Q + 2 K) D]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]


class PostAttention(NamedTuple):
    """Weights of a layer after attention, in the model's dtype unless quantized."""

    output_weight: Weight  # [H, Q D]
    output_bias: torch.Tensor | None  # [H]
    post_norm: torch.Tensor  # [H]
    gate_up_weight: Weight  # [2 I, H], rows: gate, up
    gate_up_bias: torch.Tensor | None  # [2 I]
    down_weight: Weight  # [H, I]
    down_bias: torch.Tensor | None  # [H]


class AttentionInputs(NamedTuple):
    """What goes into an attention call, and the residual stream that goes around it.

    With `RegionSpec.rotates_in_op` query and key are slices of the fused projection as value is:
    neither normalised nor rotated.
    """

    query: torch.Tensor  # [T, Q, D] contiguous, rotated
    key: torch.Tensor  # [T, K, D] contiguous, rotated
    value: torch.Tensor  # [T, K, D] slice of the fused projection: tokens lie (Q + 2 K) D apart
    residual: torch.Tensor  # [T, H]


class FirstRegion(Protocol):
    """`first(spec, embedding, pre, rope_table, input_ids, positions)`."""

    def __call__(
        self,
        spec: RegionSpec,
        embedding: torch.Tensor,
        pre: PreAttention,
        rope_table: torch.Tensor,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        /,
    ) -> AttentionInputs: ...


class MiddleRegion(Protocol):
    """`middle(spec, post, pre, rope_table, attn_out, residual, positions)`."""

    def __call__(
        self,
        spec: RegionSpec,
        post: PostAttention,
        pre: PreAttention,
        rope_table: torch.Tensor,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        /,
    ) -> AttentionInputs: ...


class LastRegion(Protocol):
    """`last(spec, post, final_norm, attn_out, residual)`."""

    def __call__(
        self,
        spec: RegionSpec,
        post: PostAttention,
        final_norm: torch.Tensor,
        attn_out: torch.Tensor,
        residual: torch.Tensor,
        /,
    ) -> torch.Tensor: ...


class LogitsRegion(Protocol):
    """`logits(spec, head_weight, hidden)`."""

    def __call__(
        self, spec: RegionSpec, head_weight: Weight, hidden: torch.Tensor, /
    ) -> torch.Tensor: ...


class Regions(NamedTuple):
    """The four functions of a model, eager or compiled."""

    first: FirstRegion
    middle: MiddleRegion
    last: LastRegion
    logits: LogitsRegion


def first(
    spec: RegionSpec,
    embedding: torch.Tensor,
    pre: PreAttention,
    rope_table: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
) -> AttentionInputs:
    """Embed the tokens and prepare layer 0's attention.

    Args:
        spec: static shape and numerics.
        embedding: [V, H].
        pre: layer 0's weights up to attention.
        rope_table: float32 [max_positions, D], see `rope.rope_table`.
        input_ids: int64 [T].
        positions: int64 [T], each token's index in its own sequence.
    """
    residual = torch.nn.functional.embedding(input_ids, embedding)
    return _before_attention(spec, pre, rope_table, residual, positions)


def middle(
    spec: RegionSpec,
    post: PostAttention,
    pre: PreAttention,
    rope_table: torch.Tensor,
    attn_out: torch.Tensor,
    residual: torch.Tensor,
    positions: torch.Tensor,
) -> AttentionInputs:
    """Finish layer i after attention and prepare layer i + 1's.

    `attn_out` is [T, Q D]; `post` are layer i's weights, `pre` layer i + 1's.
    """
    residual = _after_attention(spec, post, attn_out, residual)
    return _before_attention(spec, pre, rope_table, residual, positions)


def last(
    spec: RegionSpec,
    post: PostAttention,
    final_norm: torch.Tensor,
    attn_out: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Finish the last layer: hidden states [T, H] after the final norm (weight [H])."""
    residual = _after_attention(spec, post, attn_out, residual)
    return rms_norm(residual, final_norm, spec.rms_norm_eps)


def logits(spec: RegionSpec, head_weight: Weight, hidden: torch.Tensor) -> torch.Tensor:
    """Vocabulary scores, float32 [S, V], of selected hidden states [S, H]; head_weight [V, H]."""
    scores = linear(hidden, head_weight)
    return scores.to(torch.float32)


EAGER_REGIONS = Regions(first, middle, last, logits)

# Per region, the positions of the arguments whose dimension 0 counts tokens; every other dimension
# of every argument is the same in every call.
TOKEN_ARGUMENTS = ((4, 5), (4, 5, 6), (3, 4), (2,))


def _before_attention(
    spec: RegionSpec,
    pre: PreAttention,
    rope_table: torch.Tensor,
    residual: torch.Tensor,
    positions: torch.Tensor,
) -> AttentionInputs:
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    normed = rms_norm(residual, pre.input_norm, spec.rms_norm_eps)
    qkv = linear(normed, pre.qkv_weight, pre.qkv_bias)
    fused = qkv.unflatten(-1, (heads + 2 * kv_heads, head_dim))
    query, key, value = fused.split((heads, kv_heads, kv_heads), dim=1)
    if spec.rotates_in_op:
        return AttentionInputs(query, key, value, residual)
    if pre.q_norm is not None and pre.k_norm is not None:
        query = rms_norm(query, pre.q_norm, spec.rms_norm_eps)
        key = rms_norm(key, pre.k_norm, spec.rms_norm_eps)
    cos_sin = rope_table[positions].to(query.dtype)
    return AttentionInputs(apply_rope(query, cos_sin), apply_rope(key, cos_sin), value, residual)


def _after_attention(
    spec: RegionSpec, post: PostAttention, attn_out: torch.Tensor, residual: torch.Tensor
) -> torch.Tensor:
    attended = row_parallel_linear(attn_out, post.output_weight, post.output_bias, spec.group)
    residual = residual + attended
    normed = rms_norm(residual, post.post_norm, spec.rms_norm_eps)
    gate_up = linear(normed, post.gate_up_weight, post.gate_up_bias)
    gated = silu_and_mul(gate_up, spec.deterministic)
    return residual + row_parallel_linear(gated, post.down_weight, post.down_bias, spec.group)
