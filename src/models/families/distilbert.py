"""DistilBERT (Sanh et al. 2019), without a head."""

from __future__ import annotations

from src.models.builder import ProgramBuilder
from src.models.config import EncoderConfig, EncoderNames, ModelConfig
from src.models.encoder import write_encoder
from src.models.families.bert import encoder_config, head_size
from src.models.families.family import Family
from src.models.fields import Fields


class DistilBert(Family):
    """BERT with one kind of token, under other names."""

    architectures = ("DistilBertModel", "DistilBertForMaskedLM")
    model_type = "distilbert"
    generates = False
    defaults = {  # noqa: RUF012
        "activation": "gelu",
        "max_position_embeddings": 512,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Positions are in a table, be it learned or of sines: the checkpoint has its rows."""
        encoder = EncoderConfig(
            num_layers=fields.integer("n_layers"),
            num_heads=fields.integer("n_heads"),
            head_dim=head_size(fields, fields.integer("dim"), "n_heads"),
            intermediate_size=fields.integer("hidden_dim"),
            activation=fields.activation("activation"),
            eps=1e-12,
            position_rows=fields.integer("max_position_embeddings"),
            first_position=0,
            token_types=1,
            names=EncoderNames(
                positions="distilbert.embeddings.position_embeddings",
                types=None,
                embedding_norm="distilbert.embeddings.LayerNorm",
                qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
                output="attention.out_lin",
                attention_norm="sa_layer_norm",
                up="ffn.lin1",
                down="ffn.lin2",
                mlp_norm="output_layer_norm",
            ),
        )
        return encoder_config(
            fields,
            encoder,
            "distilbert",
            embedding="distilbert.embeddings.word_embeddings",
            layer="distilbert.transformer.layer.{}",
        )

    @classmethod
    def write(cls, builder: ProgramBuilder, config: ModelConfig) -> None:
        """An encoder in place of a decoder."""
        write_encoder(builder, config)
