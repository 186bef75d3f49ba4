"""Writes the program of a decoder from its description: one layer after the other."""

from __future__ import annotations

from functools import partial

import torch

from src.models.builder import Name, ProgramBuilder
from src.models.config import ModelConfig
from src.models.layers import embedding as ends
from src.models.layers.norms import NormSpec
from src.models.parts import RESIDUAL, WRITERS, LayerWriter
from src.models.program import HIDDEN, INPUT_IDS, LOGITS, StepTensor
from src.models.weights.parameters import Placement


def write_decoder(builder: ProgramBuilder, config: ModelConfig) -> None:
    """Write the program and the parameters of a decoder."""
    residual = builder.step_tensor(RESIDUAL, config.hidden_size)
    rows = (config.vocab_size, config.hidden_size)
    stored = (Placement(f"{config.embedding_name}.weight"),)
    embedding = builder.parameter("embedding", rows, "embedding", stored)
    # The reference multiplies by a tensor of the model's dtype, so the factor is rounded to it.
    multiplier = float(torch.tensor(config.embedding_multiplier, dtype=builder.dtype))
    builder.segment(
        ends.embed,
        ends.EmbeddingSpec(multiplier),
        ends.EmbeddingWeights(embedding),
        (INPUT_IDS,),
        (residual,),
    )
    for layer in range(len(config.layers)):
        _write_layer(LayerWriter(builder, config, layer))
    norm = _norm(builder, "final_norm", config.hidden_size, config.final_norm_name, config.norm)
    builder.segment(
        ends.final_norm,
        config.norm,
        ends.NormWeights(norm),
        (RESIDUAL,),
        (builder.step_tensor(HIDDEN, config.hidden_size),),
    )
    if config.tie_word_embeddings:
        head = builder.alias("head", of=embedding)
    else:
        head = builder.parameter("head", rows, "head", (Placement(f"{config.head_name}.weight"),))
    builder.head(
        ends.head,
        ends.HeadSpec(config.logit_cap, config.logit_multiplier),
        ends.HeadWeights(head),
        (HIDDEN,),
        (StepTensor(LOGITS, (config.vocab_size,), torch.float32),),
    )


def _norm(builder: ProgramBuilder, name: str, size: int, tensor: str, spec: NormSpec) -> Name:
    return builder.vector(name, size, f"{tensor}.weight", fill=spec.neutral)


def _write_layer(layer: LayerWriter) -> None:
    config = layer.config
    write_mixing, write_mlp = WRITERS[type(config.attention)], WRITERS[type(config.mlp)]
    if config.parallel:
        # The MLP adds to the residual stream after attention has read it.
        write_mixing(layer, config.attention, between=partial(write_mlp, layer, config.mlp))
    else:
        write_mixing(layer, config.attention)
        write_mlp(layer, config.mlp)
