"""BERT (Devlin et al. 2019), without a head: MiniLM, E5, BGE, GTE, Arctic and others."""

from __future__ import annotations

from src.core.errors import ModelLoadError
from src.models.builder import ProgramBuilder
from src.models.config import (
    HEAD_DIM_MULTIPLE,
    MAX_HEAD_DIM,
    EncoderConfig,
    EncoderNames,
    ModelConfig,
)
from src.models.encoder import write_encoder
from src.models.families.family import Family
from src.models.fields import Fields
from src.models.layers.norms import NormSpec
from src.models.layers.rope import RopeConfig


def encoder_names(body: str) -> EncoderNames:
    """BERT's names of tensors, for a model whose checkpoint calls its body so."""
    return EncoderNames(
        positions=f"{body}.embeddings.position_embeddings",
        types=f"{body}.embeddings.token_type_embeddings",
        embedding_norm=f"{body}.embeddings.LayerNorm",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        mlp_norm="output.LayerNorm",
    )


def bert_config(fields: Fields, body: str, first_position: int = 0) -> ModelConfig:
    """The encoder that `config.json` describes in BERT's fields.

    Parameters
    ----------
    fields
        The fields of `config.json`.
    body
        What names of tensors begin with in a checkpoint that has a head.
    first_position
        See `EncoderConfig`; rows before it are no positions.
    """
    for name in ("is_decoder", "add_cross_attention"):
        if fields.boolean(name):
            raise fields.error(name, "false for an encoder")
    kind = fields.raw("position_embedding_type")
    if kind not in (None, "absolute"):
        raise fields.error("position_embedding_type", "absolute")
    layers = fields.integer("num_hidden_layers")
    rows = fields.integer("max_position_embeddings")
    if rows <= first_position:
        raise fields.error("max_position_embeddings", f"more than {first_position}")
    encoder = EncoderConfig(
        num_layers=layers,
        num_heads=fields.integer("num_attention_heads"),
        head_dim=head_size(fields, fields.integer("hidden_size")),
        intermediate_size=fields.integer("intermediate_size"),
        activation=fields.activation("hidden_act"),
        eps=fields.number("layer_norm_eps", default=1e-12),
        position_rows=rows,
        first_position=first_position,
        token_types=fields.integer("type_vocab_size", default=2),
        names=encoder_names(body),
    )
    return encoder_config(
        fields,
        encoder,
        body,
        embedding=f"{body}.embeddings.word_embeddings",
        layer=f"{body}.encoder.layer.{{}}",
    )


def head_size(fields: Fields, hidden: int, heads_field: str = "num_attention_heads") -> int:
    """Elements of a head.

    Raises
    ------
    ModelLoadError
        The heads do not divide the hidden size, or attention's kernels do not take the quotient.
    """
    heads = fields.integer(heads_field)
    size = hidden // heads
    if hidden % heads or size % HEAD_DIM_MULTIPLE or not size <= MAX_HEAD_DIM:
        raise ModelLoadError(
            f"hidden_size={hidden} over {heads} heads must be a multiple of {HEAD_DIM_MULTIPLE} "
            f"up to {MAX_HEAD_DIM}"
        )
    return size


def encoder_config(
    fields: Fields, encoder: EncoderConfig, body: str, *, embedding: str, layer: str
) -> ModelConfig:
    """The model of an encoder; heads that its checkpoint may have are not read."""
    return ModelConfig(
        architecture=fields.raw("architectures")[0],
        vocab_size=fields.integer("vocab_size"),
        hidden_size=encoder.num_heads * encoder.head_dim,
        max_position_embeddings=encoder.position_rows - encoder.first_position,
        rope=RopeConfig(),
        tie_word_embeddings=False,
        dtype=fields.dtype(),
        norm=NormSpec(encoder.eps, centered=True),
        layers=(),
        encoder=encoder,
        embedding_name=embedding,
        layer_name=layer,
        head_name="",
        unread=(f"{body}.pooler.", f"{body}.embeddings.position_ids", "cls.", "lm_head.", "vocab_"),
    )


class Bert(Family):
    """Norms behind the sums, positions from a table, two kinds of tokens."""

    architectures = ("BertModel", "BertForMaskedLM")
    model_type = "bert"
    generates = False
    defaults = {  # noqa: RUF012
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """The kind of every token is the first."""
        return bert_config(fields, "bert")

    @classmethod
    def write(cls, builder: ProgramBuilder, config: ModelConfig) -> None:
        """An encoder in place of a decoder."""
        write_encoder(builder, config)
