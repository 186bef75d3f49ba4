"""Writes the program of a decoder from its description: one layer after the other."""

from __future__ import annotations

from functools import partial

import torch

from src.models.builder import Name, ProgramBuilder
from src.models.config import ModelConfig
from src.models.heads.head import write_classifier
from src.models.layers import embedding as ends
from src.models.layers.encoder import widen
from src.models.layers.norms import NormSpec
from src.models.parts import RESIDUAL, WRITERS, LayerWriter
from src.models.program import (
    EMBEDDINGS,
    HIDDEN,
    INPUT_IDS,
    IS_EMBEDDED,
    LOGITS,
    StepInput,
    StepTensor,
)
from src.models.weights.parameters import Placement


def write_decoder(builder: ProgramBuilder, config: ModelConfig) -> None:
    """Write the program and the parameters of a decoder."""
    embedding = write_embedding(builder, config)
    for layer in range(len(config.layers)):
        write_tap(builder, config, layer)
        write_layer(builder, config, layer)
    write_tap(builder, config, len(config.layers))
    write_end(builder, config, embedding)


def write_embedding(builder: ProgramBuilder, config: ModelConfig) -> Name:
    """Write what makes the residual stream; returns the name of the embedding."""
    rows = (config.vocab_size, config.hidden_size)
    stored = (Placement(f"{config.embedding_name}.weight"),)
    embedding = builder.parameter("embedding", rows, "embedding", stored)
    # The reference multiplies by a tensor of the model's dtype, so the factor is rounded to it.
    multiplier = float(torch.tensor(config.embedding_multiplier, dtype=builder.dtype))
    given = _given_embeddings(builder, config) if config.takes_embeddings else ()
    residual = builder.step_tensor(RESIDUAL, config.hidden_size)
    builder.segment(
        ends.embed_or_take if given else ends.embed,
        ends.EmbeddingSpec(multiplier),
        ends.EmbeddingWeights(embedding),
        (INPUT_IDS, *given),
        (residual,),
    )
    if (name := config.embedding_norm_name) is not None:
        norm = _norm(builder, "embedding_norm", config.hidden_size, name, config.norm)
        weights = ends.NormWeights(norm)
        builder.segment(ends.final_norm, config.norm, weights, (RESIDUAL,), (residual,))
    return embedding


def write_tap(builder: ProgramBuilder, config: ModelConfig, layer: int) -> None:
    """Keep what the layer reads for the end of the program, if somebody wants it."""
    if layer in builder.taps:
        tapped = builder.step_tensor(_tap(layer), config.hidden_size)
        builder.segment(ends.tap, None, (), (RESIDUAL,), (tapped,))


def _tap(layer: int) -> str:
    return f"tap.{layer}"


def write_layer(builder: ProgramBuilder, config: ModelConfig, number: int) -> None:
    """Write one layer, which adds to the residual stream."""
    layer, parts = LayerWriter(builder, config, number), config.layers[number]
    write_mixing, write_mlp = WRITERS[type(parts.attention)], WRITERS[type(parts.mlp)]
    if parts.parallel:
        # The MLP adds to the residual stream after attention has read it.
        write_mixing(layer, parts.attention, between=partial(write_mlp, layer, parts.mlp))
    else:
        write_mixing(layer, parts.attention)
        write_mlp(layer, parts.mlp)


def write_end(builder: ProgramBuilder, config: ModelConfig, embedding: Name) -> None:
    """Write the final norm and the head, which may be the embedding or a classifier's.

    Without a classifier's, a model whose tokens see later ones ends in hidden states.
    """
    norm = _norm(builder, "final_norm", config.hidden_size, config.final_norm_name, config.norm)
    taps = tuple(map(_tap, builder.taps))
    builder.segment(
        ends.final_norm_and_taps if taps else ends.final_norm,
        config.norm,
        ends.NormWeights(norm),
        (RESIDUAL, *taps),
        (builder.step_tensor(HIDDEN, (1 + len(taps)) * config.hidden_size),),
    )
    if config.classifier is not None:
        write_classifier(builder, config)
        return
    if config.looks_ahead:
        states = StepTensor(LOGITS, (config.hidden_size,), torch.float32)
        builder.head(widen, None, (), (HIDDEN,), (states,))
        return
    if config.tie_word_embeddings:
        head = builder.alias("head", of=embedding)
    else:
        rows = (config.vocab_size, config.hidden_size)
        head = builder.parameter("head", rows, "head", (Placement(f"{config.head_name}.weight"),))
    spec = ends.HeadSpec(config.logit_cap, config.logit_multiplier)
    builder.head(
        ends.tapped_head if taps else ends.head,
        ends.TappedHeadSpec(spec, config.hidden_size) if taps else spec,
        ends.HeadWeights(head),
        (HIDDEN,),
        (StepTensor(LOGITS, (config.vocab_size,), torch.float32),),
    )


def _given_embeddings(builder: ProgramBuilder, config: ModelConfig) -> tuple[str, ...]:
    """Declare the step inputs by which requests bring embeddings."""
    embeddings = builder.step_tensor(EMBEDDINGS, config.hidden_size)
    is_embedded = StepTensor(IS_EMBEDDED, (), torch.int64)
    inputs = (StepInput(embeddings), StepInput(is_embedded, below=2))
    return tuple(builder.step_input(each).name for each in inputs)


def _norm(builder: ProgramBuilder, name: str, size: int, tensor: str, spec: NormSpec) -> Name:
    return builder.vector(name, size, f"{tensor}.weight", fill=spec.neutral)
