"""ModernBERT (Warner et al. 2024), without a head: windows beside full attention, both ways."""

from __future__ import annotations

from dataclasses import replace

from src.models.config import ModelConfig
from src.models.families.bert import head_size
from src.models.families.family import Family, attention, decoder, mlp
from src.models.fields import LAYER_TYPES, Fields
from src.models.layers.norms import NormSpec
from src.ops.attention.spec import ALL_AHEAD


class ModernBert(Family):
    """Norms before blocks and behind the embedding, RoPE with a base for each kind of layer."""

    architectures = ("ModernBertModel", "ModernBertForMaskedLM")
    model_type = "modernbert"
    generates = False
    defaults = {  # noqa: RUF012
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "classifier_activation": "gelu",
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """The first layer reads the embedding's norm, so it has none of its own before attention.

        A window is for both sides together.
        """
        if fields.boolean("norm_bias"):
            raise fields.error("norm_bias", "false (norms have no biases)")
        if fields.raw("rope_scaling") is not None:
            raise fields.error("rope_scaling", "null (rope_parameters has each kind of layers)")
        layers, positions = (
            fields.integer(name) for name in ("num_hidden_layers", "max_position_embeddings")
        )
        every = fields.integer("global_attn_every_n_layers")
        kinds = fields.strings("layer_types", layers, LAYER_TYPES) or [
            "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
        ]
        head_size(fields, fields.integer("hidden_size"))
        side = fields.integer("local_attention") // 2
        if side < 1:
            raise fields.error("local_attention", "at least 2, half of it on each side")
        whole = attention(
            fields,
            fields.rope(positions, "full_attention", theta=("global_rope_theta", 1.6e5)),
            ahead=ALL_AHEAD,
            qkv_bias=fields.boolean("attention_bias"),
            output_bias=fields.boolean("attention_bias"),
            qkv_names=("attn.Wqkv",),
            output_name="attn.Wo",
        )
        near = fields.rope(positions, "sliding_attention", theta=("local_rope_theta", 1e4))
        local = replace(whole, rope=near, window=side + 1, ahead=side)
        inner = mlp(
            fields,
            activation=fields.activation("hidden_activation"),
            bias=fields.boolean("mlp_bias"),
            gate_up_names=("mlp.Wi",),
            down_name="mlp.Wo",
        )
        config = decoder(
            fields,
            [local if kind == "sliding_attention" else whole for kind in kinds],
            [inner] * layers,
            norm=NormSpec(fields.number("norm_eps"), centered=True, scales_wide=True),
            layer_norms={"attention_norm": "attn_norm", "mlp_norm": "mlp_norm"},
            rope=whole.rope,
            unread=("head.", "decoder."),
            embedding_name="model.embeddings.tok_embeddings",
            embedding_norm_name="model.embeddings.norm",
            layer_name="model.layers.{}",
            final_norm_name="model.final_norm",
        )
        first = replace(config.layers[0], attention_norm=None)
        return replace(config, layers=(first, *config.layers[1:]))
