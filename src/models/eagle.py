"""EAGLE-3's layer: it goes on from a model's own hidden states, token by token.

Y. Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", arXiv 2503.01840, section 3. At each position the layer reads the embedding of the *next*
token, and a feature: what a linear layer makes of hidden states of the model at this position. What
leaves the layer is the feature of the position behind, as long as the model has none there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from src.models.builder import ProgramBuilder
from src.models.config import AttentionConfig, MLPConfig, ModelConfig
from src.models.layers import embedding as ends
from src.models.layers.norms import NormSpec, rms_norm
from src.models.parts.attention import write_attention
from src.models.parts.layer import RESIDUAL, LayerWriter
from src.models.parts.mlp import write_mlp
from src.models.program import HIDDEN, LOGITS, StepInput, StepTensor
from src.models.weights.parameters import Placement

FEATURE, EMBEDDED, CARRIED = "feature", "embedded", "carried"
"""Step inputs [T, H]: features, and embeddings of the next tokens. Output [T, H]: what the layer
gives as the next position's feature."""
_COMBINED = "combined"


@dataclass(frozen=True, slots=True)
class EagleForm:
    """How checkpoints of EAGLE-3 differ.

    Attributes
    ----------
    fused
        Size of the hidden states that the linear layer reads; None: there is none, and a feature is
        a hidden state of the model.
    head_size
        Tokens that its head knows; None: it has none, and the model's own is used.
    has_embedding
        Whether it has one of its own.
    norm_before_residual
        Whether the sum begins with the normalized feature.
    """

    fused: int | None
    head_size: int | None
    has_embedding: bool
    norm_before_residual: bool


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """The static part of `combine`."""

    norm: NormSpec
    norm_before_residual: bool


class CombineWeights(NamedTuple):
    """Norms of embeddings and features, [H] each."""

    embedding_norm: Tensor
    feature_norm: Tensor


def combine(
    spec: CombineSpec, weights: CombineWeights, embedded: Tensor, feature: Tensor
) -> tuple[Tensor, Tensor]:
    """The residual stream [T, H], and what attention projects, [T, 2 H]."""
    normed = rms_norm(feature, weights.feature_norm, spec.norm)
    both = torch.cat((rms_norm(embedded, weights.embedding_norm, spec.norm), normed), dim=-1)
    return (normed if spec.norm_before_residual else feature.clone()), both


def carry(spec: None, weights: tuple[()], residual: Tensor) -> Tensor:
    """What leaves the layer, before its norm."""
    return residual.clone()


def pass_on(spec: None, weights: tuple[()], hidden: Tensor) -> Tensor:
    """In place of a head: hidden states, for the model's own."""
    return hidden.clone()


def write_eagle(builder: ProgramBuilder, config: ModelConfig, form: EagleForm) -> None:
    """Write the program and the parameters of a head with one layer."""
    hidden = config.hidden_size
    for name in (EMBEDDED, FEATURE):
        builder.step_input(StepInput(builder.step_tensor(name, hidden)))
    layer = LayerWriter(builder, config, 0)
    combined = builder.step_tensor(_COMBINED, 2 * hidden)
    weights = CombineWeights(
        layer.block_norm("embedding_norm", "input_layernorm"),
        layer.block_norm("feature_norm", "hidden_norm"),
    )
    builder.segment(
        combine,
        CombineSpec(config.norm, form.norm_before_residual),
        weights,
        (EMBEDDED, FEATURE),
        (layer.residual, combined),
    )
    attention, mlp = layer.config.attention, layer.config.mlp
    assert isinstance(attention, AttentionConfig)
    assert isinstance(mlp, MLPConfig)
    write_attention(layer, attention, reads=combined)
    write_mlp(layer, mlp)
    builder.segment(carry, None, (), (RESIDUAL,), (builder.step_tensor(CARRIED, hidden),))
    builder.output(CARRIED)
    norm = builder.vector(
        "final_norm", hidden, f"{config.final_norm_name}.weight", fill=config.norm.neutral
    )
    builder.segment(
        ends.final_norm,
        config.norm,
        ends.NormWeights(norm),
        (RESIDUAL,),
        (builder.step_tensor(HIDDEN, hidden),),
    )
    _write_head(builder, config, form)
    if form.fused is not None:
        builder.parameter("fc", (hidden, form.fused), "matrix", (Placement("fc.weight"),))
    if form.has_embedding:
        stored = (Placement(f"{config.embedding_name}.weight"),)
        builder.parameter("embedding", (config.vocab_size, hidden), "embedding", stored)


def _write_head(builder: ProgramBuilder, config: ModelConfig, form: EagleForm) -> None:
    hidden = config.hidden_size
    if form.head_size is None:
        builder.head(pass_on, None, (), (HIDDEN,), (builder.step_tensor(LOGITS, hidden),))
        return
    stored = (Placement(f"{config.head_name}.weight"),)
    head = builder.parameter("head", (form.head_size, hidden), "head", stored)
    builder.head(
        ends.head,
        ends.HeadSpec(),
        ends.HeadWeights(head),
        (HIDDEN,),
        (StepTensor(LOGITS, (form.head_size,), torch.float32),),
    )
