"""Writes the program of an encoder in BERT's form: with a classifier's head, or without a head."""

from __future__ import annotations

import torch

from src.core.request import TOKEN_TYPES
from src.models.builder import Name, ProgramBuilder
from src.models.config import EncoderConfig, ModelConfig
from src.models.heads.head import write_classifier
from src.models.layers import encoder as layers
from src.models.layers.attention import AttentionMixerSpec, AttentionMixerWeights
from src.models.program import (
    HIDDEN,
    INPUT_IDS,
    LOGITS,
    POSITIONS,
    StepInput,
    StepTensor,
)
from src.models.weights.parameters import Placement, rows_of
from src.ops.attention.spec import ALL_AHEAD

STREAM, QUERY, KEY, VALUE, ATTENDED = "stream", "query", "key", "value", "attended"


def write_encoder(builder: ProgramBuilder, config: ModelConfig) -> None:
    """Write the program and the parameters of an encoder.

    Raises
    ------
    ValueError
        The group has several ranks.
    """
    encoder = config.encoder
    assert encoder is not None
    if builder.group.size > 1:
        raise ValueError("encoders are computed on one device")
    writer = _Writer(builder, config, encoder)
    writer.embedding()
    for layer in range(encoder.num_layers):
        writer.layer(layer)
    writer.end()


class _Writer:
    def __init__(
        self, builder: ProgramBuilder, config: ModelConfig, encoder: EncoderConfig
    ) -> None:
        self.builder = builder
        self.config = config
        self.encoder = encoder
        self.hidden = config.hidden_size
        self.stream = builder.step_tensor(STREAM, self.hidden)

    def vector(self, name: str, tensor: str, size: int, *, fill: float = 0.0) -> Name:
        return self.builder.vector(name, size, tensor, fill=fill)

    def norm(self, own: str, stored: str) -> tuple[Name, Name]:
        return (
            self.vector(f"{own}norm", f"{stored}.weight", self.hidden, fill=1.0),
            self.vector(f"{own}norm_bias", f"{stored}.bias", self.hidden),
        )

    def table(self, name: str, stored: str, rows: int) -> Name:
        placements = (Placement(f"{stored}.weight"),)
        return self.builder.parameter(name, (rows, self.hidden), "embedding", placements)

    def matrix(self, name: str, stored: str, outputs: int, inputs: int) -> tuple[Name, Name]:
        placements = (Placement(f"{stored}.weight"),)
        return (
            self.builder.parameter(f"{name}_weight", (outputs, inputs), "matrix", placements),
            self.vector(f"{name}_bias", f"{stored}.bias", outputs),
        )

    def embedding(self) -> None:
        names, encoder = self.encoder.names, self.encoder
        types = None
        if names.types is not None:
            types = self.table("types", names.types, encoder.token_types)
        tokens = self.table("embedding", self.config.embedding_name, self.config.vocab_size)
        positions = self.table("positions", names.positions, encoder.position_rows)
        given: tuple[str, ...] = ()
        if types is not None and self.config.takes_token_types:
            kinds = StepInput(StepTensor(TOKEN_TYPES, (), torch.int64), below=encoder.token_types)
            given = (self.builder.step_input(kinds).name,)
        self.builder.segment(
            layers.embed_pairs if given else layers.embed,
            layers.EncoderEmbeddingSpec(encoder.eps, encoder.first_position),
            layers.EncoderEmbeddingWeights(
                tokens, positions, types, *self.norm("embedding_", names.embedding_norm)
            ),
            (INPUT_IDS, POSITIONS, *given),
            (self.stream,),
        )

    def layer(self, number: int) -> None:
        encoder, builder = self.encoder, self.builder
        own, stored = f"layers.{number}.", self.config.layer_name.format(number) + "."
        names, heads, size = encoder.names, encoder.num_heads, encoder.num_heads * encoder.head_dim
        sizes = [size] * 3

        def fused(kind: str) -> tuple[Placement, ...]:
            return rows_of([f"{stored}{name}.{kind}" for name in names.qkv], sizes)

        qkv_weight = builder.parameter(
            f"{own}qkv_weight", (3 * size, self.hidden), "matrix", fused("weight")
        )
        qkv_bias = builder.parameter(
            f"{own}qkv_bias", (3 * size,), "vector", fused("bias"), fill=0.0
        )
        builder.segment(
            layers.project,
            layers.ProjectSpec(heads, encoder.head_dim),
            layers.ProjectWeights(qkv_weight, qkv_bias),
            (STREAM,),
            [builder.step_tensor(name, heads, encoder.head_dim) for name in (QUERY, KEY, VALUE)],
        )
        builder.mixer(
            "attention",
            AttentionMixerSpec(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=encoder.head_dim,
                dtype=builder.dtype,
                scale=encoder.head_dim**-0.5,
                window=None,
                cap=None,
                rotates=None,
                deterministic=builder.deterministic,
                ahead=ALL_AHEAD,
            ),
            AttentionMixerWeights(),
            (QUERY, KEY, VALUE),
            builder.step_tensor(ATTENDED, size),
        )
        sums = layers.SumNormSpec(encoder.eps, encoder.activation, builder.deterministic)
        builder.segment(
            layers.attended_norm,
            sums,
            layers.AttendedWeights(
                *self.matrix(f"{own}output", stored + names.output, self.hidden, size),
                *self.norm(f"{own}attention_", stored + names.attention_norm),
            ),
            (ATTENDED, STREAM),
            (self.stream,),
        )
        inner = encoder.intermediate_size
        builder.segment(
            layers.mlp_norm,
            sums,
            layers.EncoderMLPWeights(
                *self.matrix(f"{own}up", stored + names.up, inner, self.hidden),
                *self.matrix(f"{own}down", stored + names.down, self.hidden, inner),
                *self.norm(f"{own}mlp_", stored + names.mlp_norm),
            ),
            (STREAM,),
            (self.stream,),
        )

    def end(self) -> None:
        hidden = self.builder.step_tensor(HIDDEN, self.hidden)
        self.builder.segment(layers.keep, None, (), (STREAM,), (hidden,))
        if self.config.classifier is not None:
            write_classifier(self.builder, self.config)
            return
        logits = StepTensor(LOGITS, (self.hidden,), torch.float32)
        self.builder.head(layers.widen, None, (), (HIDDEN,), (logits,))
