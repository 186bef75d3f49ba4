"""DeepSeek-V3 and R1 (DeepSeek-AI 2024): V2's attention, experts chosen by sigmoids and biases."""

from __future__ import annotations

from src.models.config import ModelConfig
from src.models.families.deepseek_v2 import chosen_groups, latent_attention, mlps_of
from src.models.families.family import Family, decoder, predicting
from src.models.fields import Fields


class DeepseekV3(Family):
    """A bias per expert takes part in the choice of groups and experts, not in their weights."""

    architectures = ("DeepseekV3ForCausalLM",)
    model_type = "deepseek_v3"
    defaults = {  # noqa: RUF012
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """Layers that predict further tokens (`num_nextn_predict_layers`) are for drafts alone."""
        for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if fields.raw(name) not in (None, known):
                raise fields.error(name, f"{known!r}")
        attention = latent_attention(fields, interleaved=fields.boolean("rope_interleave"))
        *mlps, further = mlps_of(
            fields,
            behind=1,
            renormalize=fields.boolean("norm_topk_prob"),
            scoring="sigmoid",
            choice_bias_name="mlp.gate.e_score_correction_bias",
            **chosen_groups(fields),
        )
        return decoder(
            fields,
            [attention] * len(mlps),
            mlps,
            rope=attention.rope,
            **predicting(fields, attention, further),
        )
