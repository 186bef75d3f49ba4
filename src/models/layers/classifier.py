"""The segment that makes scores of labels from hidden states: dense layers, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from src.models.layers.activations import Activation, activate
from src.models.layers.linear import linear
from src.models.layers.norms import NormSpec, layer_norm, rms_norm
from src.ops.elementwise import by_token

DenseActivation: TypeAlias = Activation | Literal["tanh", "relu", "none"]


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """The static part of a dense layer.

    Attributes
    ----------
    activation
        Of its outputs.
    eps
        Of the norm behind that, if it has one.
    """

    activation: DenseActivation = "none"
    eps: float = 1e-5


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """The static part of `classify`.

    Attributes
    ----------
    layers
        In order.
    deterministic
        Whether a row's scores must be the same bits in every batch.
    """

    layers: tuple[DenseSpec, ...]
    deterministic: bool = False


class DenseWeights(NamedTuple):
    """Weights of a dense layer from I to O numbers."""

    weight: Tensor  # [O, I]
    bias: Tensor | None  # [O]
    norm: Tensor | None  # [O]
    norm_bias: Tensor | None  # [O]


def classify(spec: ClassifierSpec, weights: tuple[DenseWeights, ...], hidden: Tensor) -> Tensor:
    """Scores of labels, float32 [S, labels], of hidden states [S, H]."""
    scores = hidden
    for own, each in zip(spec.layers, weights, strict=True):
        scores = linear(scores, each.weight, each.bias)
        if own.activation != "none":
            function = partial(_activate, own.activation)
            scores = by_token(function, scores) if spec.deterministic else function(scores)
        if each.norm is not None:
            scores = _normed(scores, each.norm, each.norm_bias, own.eps)
    return scores.to(torch.float32)


def _normed(x: Tensor, norm: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return rms_norm(x, norm, NormSpec(eps, centered=True))
    return layer_norm(x, norm, bias, eps)


def _activate(activation: DenseActivation, x: Tensor) -> Tensor:
    if activation == "tanh":
        return torch.tanh(x)
    if activation == "relu":
        return functional.relu(x)
    assert activation != "none"
    return activate(x, activation)
