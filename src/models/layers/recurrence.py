"""The segments around a recurrent state, and the static arguments of its mixer.

Two kinds of layers are alike but for how they project: the gated delta rule (S. Yang et al., "Gated
Delta Networks", 2024) and Mamba-2 (T. Dao and A. Gu, "Transformers are SSMs", 2024). Both convolve
queries, keys and values along the sequence, keep a state per head, and gate what is read from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from src.models.layer_kv import KVTensor, LayerKVSpec
from src.models.layers.activations import sigmoid
from src.models.layers.attention import add
from src.models.layers.linear import linear
from src.models.layers.norms import NormSpec, rms_norm
from src.models.weights.parameters import Weight
from src.ops.elementwise import by_token


@dataclass(frozen=True, slots=True)
class RecurrenceInSpec:
    """The static part of `delta_in` and `mamba_in`.

    Attributes
    ----------
    norm
        Norm of the residual stream; None: not normalized.
    heads
        Heads of values.
    gate
        Elements of the gate: those of all heads' values.
    channels
        Elements of queries, keys and values together, which are convolved.
    shortest, longest
        Bounds of a token's time step (Mamba-2); None: unbounded.
    deterministic
        Whether a token's result must be the same bits in every batch.
    """

    norm: NormSpec | None
    heads: int
    gate: int
    channels: int
    shortest: float | None = None
    longest: float | None = None
    deterministic: bool = False


class RecurrenceInWeights(NamedTuple):
    """Weights of `delta_in` and `mamba_in`, in the model's dtype unless quantized or noted."""

    norm: Tensor | None  # [H]
    weight: Weight  # [rows, H]; the segment's docstring has the order of rows
    bias: Tensor | None  # [rows]
    log_decay: Tensor  # float32 [heads]: logarithm of the negative decay rate
    step_bias: Tensor  # float32 [heads]


@dataclass(frozen=True, slots=True)
class RecurrenceOutSpec:
    """The static part of `recurrence_out`.

    Attributes
    ----------
    eps
        Of the norm of what is read.
    groups
        How many equal parts of all heads' values are normalized each by itself.
    gates_first
        Whether the gate is a factor before the norm, or behind it.
    repeats
        Whether all groups have one weight.
    post_norm
        Of the output, before it is added.
    """

    eps: float
    groups: int
    gates_first: bool
    repeats: bool
    post_norm: NormSpec | None
    multiplier: float


class RecurrenceOutWeights(NamedTuple):
    """Weights of `recurrence_out`."""

    norm: Tensor  # [values of a group] if it repeats, else [values of all heads]
    output_weight: Weight  # [H, values of all heads]
    output_bias: Tensor | None  # [H]
    post_norm: Tensor | None  # [H]


@dataclass(frozen=True, slots=True)
class RecurrenceMixerSpec:
    """Static arguments of the mixer of one layer.

    Attributes
    ----------
    key_heads, heads, key_dim, dim
        Heads of queries and keys; heads of values; elements of a key; elements of a value.
    taps
        Tokens that the convolution sees, the token itself included.
    value_first
        Whether channels are values, keys, queries, or queries, keys, values.
    delta, normalizes
        See `ops.linear_recurrence`.
    dtype
        Of what is convolved. States are in float32.
    deterministic
        Whether a token's result must be the same bits in every batch; it always is.
    """

    key_heads: int
    heads: int
    key_dim: int
    dim: int
    taps: int
    value_first: bool
    delta: bool
    normalizes: bool
    dtype: torch.dtype
    deterministic: bool

    @property
    def channels(self) -> int:
        """Elements of queries, keys and values together."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.dim

    def kv(self) -> LayerKVSpec:
        """See `layer_kv.MixerSpec`."""
        tensors = (
            KVTensor("inputs", (self.taps - 1, self.channels), self.dtype),
            KVTensor("states", (self.heads, self.key_dim, self.dim), torch.float32),
        )
        return LayerKVSpec("recurrent states", tensors, per="sequence")

    def parts(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slices of channels [T, C]: queries and keys [T, K, N], and values [T, H, P]."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.dim
        if self.value_first:
            value, key, query = channels.split((values, keys, keys), dim=-1)
        else:
            query, key, value = channels.split((keys, keys, values), dim=-1)
        return (
            query.unflatten(-1, (self.key_heads, self.key_dim)),
            key.unflatten(-1, (self.key_heads, self.key_dim)),
            value.unflatten(-1, (self.heads, self.dim)),
        )


class RecurrenceMixerWeights(NamedTuple):
    """Weights of the mixer."""

    weight: Tensor  # [K, C], of the convolution
    bias: Tensor | None  # [C]
    skip: Tensor | None  # float32 [heads], see `ops.linear_recurrence`


def delta_in(
    spec: RecurrenceInSpec, weights: RecurrenceInWeights, residual: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project the residual stream [T, H] for the gated delta rule.

    Returns channels [T, C], a slice. In float32: the gate [T, gate], decay and factor [T, heads].
    Rows of the weight are channels, gate, strengths of writing, and time steps.
    """
    sizes = (spec.channels, spec.gate, spec.heads, spec.heads)
    channels, gate, strength, step = _projected(spec, weights, residual).split(sizes, dim=-1)
    rate = -weights.log_decay.exp()
    decay = rate * _softplus(step.to(torch.float32) + weights.step_bias, spec.deterministic)
    strength = sigmoid(strength, spec.deterministic).to(torch.float32)
    return channels, _opened(gate, spec.deterministic), decay, strength


def mamba_in(
    spec: RecurrenceInSpec, weights: RecurrenceInWeights, residual: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project the residual stream [T, H] for Mamba-2; returns what `delta_in` does.

    Rows of the weight are gate, channels, and time steps.
    """
    sizes = (spec.gate, spec.channels, spec.heads)
    gate, channels, step = _projected(spec, weights, residual).split(sizes, dim=-1)
    step = _softplus(step.to(torch.float32) + weights.step_bias, spec.deterministic)
    if spec.shortest is not None or spec.longest is not None:
        step = step.clamp(spec.shortest, spec.longest)
    opened = _opened(gate, spec.deterministic)
    return channels, opened, -weights.log_decay.exp() * step, step


def _opened(gate: Tensor, deterministic: bool) -> Tensor:
    wide = gate.to(torch.float32)
    return by_token(functional.silu, wide) if deterministic else functional.silu(wide)


def _softplus(x: Tensor, deterministic: bool) -> Tensor:
    return by_token(functional.softplus, x) if deterministic else functional.softplus(x)


def _projected(spec: RecurrenceInSpec, weights: RecurrenceInWeights, residual: Tensor) -> Tensor:
    normed = residual
    if spec.norm is not None and weights.norm is not None:
        normed = rms_norm(residual, weights.norm, spec.norm)
    return linear(normed, weights.weight, weights.bias)


def recurrence_out(
    spec: RecurrenceOutSpec,
    weights: RecurrenceOutWeights,
    read: Tensor,
    gate: Tensor,
    residual: Tensor,
) -> Tensor:
    """Add what was read from the states, [T, gate], to the residual stream [T, H].

    It is normalized, gated and projected first.
    """
    wide = read.to(torch.float32)
    if spec.gates_first:
        wide = wide * gate
    size = read.shape[-1] // spec.groups
    mean = wide.unflatten(-1, (spec.groups, size)).square().mean(-1)
    scale = torch.rsqrt(mean + spec.eps).repeat_interleave(size, dim=-1)
    weight = weights.norm.repeat(spec.groups) if spec.repeats else weights.norm
    normed = weight * (wide * scale).to(read.dtype)
    if not spec.gates_first:
        normed = (normed * gate).to(read.dtype)
    added = linear(normed, weights.output_weight, weights.output_bias)
    return add(residual, added, weights.post_norm, spec.post_norm, spec.multiplier)
