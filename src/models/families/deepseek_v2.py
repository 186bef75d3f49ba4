"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, and experts beside shared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from src.core.errors import ModelLoadError
from src.models.config import (
    MAX_LATENT_DIM,
    ExpertsConfig,
    LatentAttentionConfig,
    MLPConfig,
    ModelConfig,
)
from src.models.families.family import Family, decoder, experts, mlp
from src.models.fields import Fields
from src.models.layers.norms import NormSpec
from src.models.layers.rope import RopeConfig

# The norms of latents do not read `rms_norm_eps`.
_INNER_NORM = NormSpec(1e-6)


class DeepseekV2(Family):
    """Experts are chosen by the softmax of their scores, among all or within the best groups."""

    architectures = ("DeepseekV2ForCausalLM",)
    model_type = "deepseek_v2"
    defaults = {  # noqa: RUF012
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
    }

    @classmethod
    def describe(cls, fields: Fields) -> ModelConfig:
        """`topk_method` chooses among all experts, or within groups whose best scores are largest.

        The reference does not read `norm_topk_prob` and `mlp_bias` in experts as the original does,
        so they are refused.
        """
        for name in ("norm_topk_prob", "mlp_bias"):
            if fields.boolean(name):
                raise fields.error(name, "false")
        if fields.raw("scoring_func") not in (None, "softmax"):
            raise fields.error("scoring_func", "'softmax'")
        groups: dict[str, Any] = {}
        method = fields.raw("topk_method")
        if method == "group_limited_greedy":
            groups = {**chosen_groups(fields), "groups_ranked_by": 1}
        elif method not in (None, "greedy"):
            raise fields.error("topk_method", "'greedy' or 'group_limited_greedy'")
        attention = latent_attention(fields, interleaved=True)
        mlps = mlps_of(fields, renormalize=False, **groups)
        return decoder(fields, [attention] * len(mlps), mlps, rope=attention.rope)


def latent_attention(fields: Fields, *, interleaved: bool) -> LatentAttentionConfig:
    """Latent attention as both versions describe it."""
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", default=heads) != heads:
        raise fields.error("num_key_value_heads", f"equal to num_attention_heads={heads}")
    rank, rotated = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    if (rank + rotated) % 8 or rank + rotated > MAX_LATENT_DIM or rotated % 2:
        raise ModelLoadError(
            f"config.json: kv_lora_rank={rank} + qk_rope_head_dim={rotated} must be a multiple of "
            f"8 up to {MAX_LATENT_DIM}, with an even number of rotated elements"
        )
    plain = fields.integer("qk_nope_head_dim")
    rope = fields.rope(fields.integer("max_position_embeddings", default=2048))
    rope.rotary_dim(rotated)
    query_rank, bias = fields.optional_integer("q_lora_rank"), fields.boolean("attention_bias")
    if bias and query_rank is None:
        raise fields.error("attention_bias", "false without q_lora_rank")
    inner = ("self_attn.q_a_proj", "self_attn.q_b_proj")
    return LatentAttentionConfig(
        num_heads=heads,
        nope_dim=plain,
        rope_dim=rotated,
        value_dim=fields.integer("v_head_dim"),
        rank=rank,
        query_rank=query_rank,
        rope=rope,
        scale=(plain + rotated) ** -0.5 * _sharpness(rope) ** 2,
        inner_norm=_INNER_NORM,
        interleaved=interleaved,
        down_bias=bias,
        output_bias=bias,
        query_names=("self_attn.q_proj",) if query_rank is None else inner,
    )


def _sharpness(rope: RopeConfig) -> float:
    """Factor of queries and keys where the context is stretched (`mscale_all_dim`)."""
    if not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def chosen_groups(fields: Fields) -> dict[str, int]:
    """Experts are in groups, and are chosen within some of them."""
    return {"groups": fields.integer("n_group"), "chosen_groups": fields.integer("topk_group")}


def mlps_of(
    fields: Fields, *, behind: int = 0, **differences: Any
) -> list[MLPConfig | ExpertsConfig]:
    """Dense layers first, then every `moe_layer_freq`-th has experts, with shared ones beside them.

    Shared experts are one MLP that is as wide as all of them. At the end are those of as many
    layers ``behind`` the last.
    """
    layers = fields.integer("num_hidden_layers") + behind
    dense = mlp(fields)
    if fields.raw("n_routed_experts") is None:
        return [dense] * layers
    inner = fields.integer("moe_intermediate_size")
    shared = fields.optional_integer("n_shared_experts")
    sparse = experts(
        fields,
        intermediate_size=inner,
        scale=fields.number("routed_scaling_factor", default=1.0),
        shared=None
        if shared is None
        else replace(
            dense,
            intermediate_size=shared * inner,
            gate_up_names=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            down_name="mlp.shared_experts.down_proj",
        ),
        **differences,
    )
    first = fields.count("first_k_dense_replace")
    step = fields.integer("moe_layer_freq", default=1)
    return [dense if layer < first or layer % step else sparse for layer in range(layers)]
