"""A layer of a model's own checkpoint that predicts one token further, as a program.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2. At each position a
matrix joins the embedding of the *next* token and the model's hidden state behind its final norm.
The layer computes what it makes of them, and a norm gives a hidden state for the model's own head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from src.models.builder import Name, ProgramBuilder
from src.models.config import ModelConfig, PredictorConfig
from src.models.decoder import write_layer
from src.models.eagle import EMBEDDED, FEATURE, pass_on
from src.models.layers import embedding as ends
from src.models.layers.linear import linear
from src.models.layers.norms import NormSpec, rms_norm
from src.models.parts.layer import RESIDUAL
from src.models.program import HIDDEN, LOGITS, StepInput
from src.models.weights.parameters import Placement, Weight


class JoinWeights(NamedTuple):
    """Norms of embeddings and of hidden states, [H] each, and the matrix [H, 2 H]."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    matrix: Weight


def join(spec: NormSpec, weights: JoinWeights, embedded: Tensor, feature: Tensor) -> Tensor:
    """The residual stream [T, H] of embeddings and hidden states, the embeddings first."""
    both = (
        rms_norm(embedded, weights.embedding_norm, spec),
        rms_norm(feature, weights.hidden_norm, spec),
    )
    return linear(torch.cat(both, dim=-1), weights.matrix)


def predictor_config(config: ModelConfig, predictor: PredictorConfig) -> ModelConfig:
    """The layer as a model of its own."""
    return replace(
        config,
        layers=(predictor.layer,),
        layer_name=predictor.layer_name,
        predictor=predictor,
    )


def write_predictor(builder: ProgramBuilder, config: ModelConfig) -> None:
    """Write the program and the parameters of a layer that `predictor_config` describes.

    Its inputs are `EMBEDDED` and `FEATURE`, and its head gives hidden states.
    """
    own, hidden = config.predictor, config.hidden_size
    assert own is not None
    for name in (EMBEDDED, FEATURE):
        builder.step_input(StepInput(builder.step_tensor(name, hidden)))

    def norm(name: str, tensor: str) -> Name:
        return builder.vector(name, hidden, f"{tensor}.weight", fill=config.norm.neutral)

    weights = JoinWeights(
        norm("embedding_norm", own.embedding_norm_name),
        norm("hidden_norm", own.hidden_norm_name),
        builder.parameter(
            "join", (hidden, 2 * hidden), "matrix", (Placement(f"{own.join_name}.weight"),)
        ),
    )
    residual = builder.step_tensor(RESIDUAL, hidden)
    builder.segment(join, config.norm, weights, (EMBEDDED, FEATURE), (residual,))
    write_layer(builder, config, 0)
    final = ends.NormWeights(norm("final_norm", own.final_norm_name))
    states = builder.step_tensor(HIDDEN, hidden)
    builder.segment(ends.final_norm, config.norm, final, (RESIDUAL,), (states,))
    builder.head(pass_on, None, (), (HIDDEN,), (builder.step_tensor(LOGITS, hidden),))
