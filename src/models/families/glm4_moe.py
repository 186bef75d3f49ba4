"""GLM-4.5 to 4.7 (Team GLM 2025): experts behind dense layers, chosen by sigmoids."""

from __future__ import annotations

from src.models.config import ExpertsConfig, MLPConfig, ModelConfig
from src.models.families.family import (
    Family,
    attention,
    decoder,
    experts,
    mlp,
    predicting,
)
from src.models.fields import Fields


class Glm4Moe(Family):
    """Experts behind a few dense layers, and rotation of a part of each head."""

    architectures = ("Glm4MoeForCausalLM",)
    model_type = "glm4_moe"
    defaults = {  # noqa: RUF012
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`attention_bias` is on queries, keys and values.

        The shared experts of a layer are one MLP of their joint width. Layers behind the last,
        which predict further tokens, are for drafts alone.
        """
        layers = fields.integer("num_hidden_layers")
        rope = fields.rope(fields.integer("max_position_embeddings"), partial=True)
        base = attention(
            fields,
            rope,
            qkv_bias=fields.boolean("attention_bias"),
            qk_norm="head" if fields.boolean("use_qk_norm") else None,
        )
        dense = fields.count("first_k_dense_replace")
        mlps: list[MLPConfig | ExpertsConfig] = [
            mlp(fields) if layer < dense else _experts(fields) for layer in range(layers + 1)
        ]
        return decoder(
            fields,
            [base] * layers,
            mlps[:layers],
            rope=rope,
            **predicting(fields, base, mlps[layers]),
        )


def _experts(fields: Fields) -> ExpertsConfig:
    inner = fields.integer("moe_intermediate_size")
    return experts(
        fields,
        intermediate_size=inner,
        renormalize=fields.boolean("norm_topk_prob", True),
        scoring="sigmoid",
        scale=fields.number("routed_scaling_factor"),
        groups=fields.integer("n_group"),
        chosen_groups=fields.integer("topk_group"),
        choice_bias_name="mlp.gate.e_score_correction_bias",
        shared=mlp(
            fields,
            intermediate_size=inner * fields.integer("n_shared_experts"),
            gate_up_names=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            down_name="mlp.shared_experts.down_proj",
        ),
    )
