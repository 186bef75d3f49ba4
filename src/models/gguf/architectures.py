"""The architectures of GGUF files that native families serve: one line each in `ARCHITECTURES`.

A line says which `model_type` of `config.json` an architecture is, how its keys of metadata and its
tensors are called there, and what a converter has done to its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from src.core.errors import ModelLoadError

# Names within a layer: GGUF's, and those of `config.json`'s world.
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GEMMA = {
    **_ATTENTION,
    **_MLP,
    **_POST_NORMS,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
_LLAMA = _ATTENTION | _MLP | _PRE_NORMS

# Keys of metadata, behind the architecture's name, and the fields of `config.json` that they are.
_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
_GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True)
class Architecture:
    """What an architecture of GGUF files is in `config.json`'s terms.

    Attributes
    ----------
    model_type
        As in `config.json`.
    names
        Names of tensors within a layer, without ``.weight`` and ``.bias``. ``{}`` stands for the
        number of an expert.
    keys
        Keys beside the usual ones, behind the architecture's name, and their fields.
    fixed
        Fields whose values follow from the architecture.
    permuted
        Whether the rows of queries and keys are stored as pairs that are rotated together.
    shifted_norms
        Whether 1 has been added to the weights of norms.
    """

    model_type: str
    names: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    permuted: bool = False
    shifted_norms: bool = False

    @property
    def all_keys(self) -> dict[str, str]:
        """Keys behind the architecture's name, and their fields."""
        return {**_KEYS, **self.keys}


ARCHITECTURES = {
    "llama": Architecture("llama", _LLAMA, permuted=True),
    "qwen2": Architecture("qwen2", _LLAMA),
    "qwen3": Architecture("qwen3", _LLAMA),
    "qwen2moe": Architecture(
        "qwen2_moe", _LLAMA | _EXPERTS, _EXPERT_KEYS, {"norm_topk_prob": False}
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", _LLAMA | _EXPERTS, _EXPERT_KEYS, {"norm_topk_prob": True}
    ),
    "gemma2": Architecture("gemma2", _GEMMA, _GEMMA_KEYS, shifted_norms=True),
    "gemma3": Architecture(
        "gemma3_text",
        _GEMMA,
        _GEMMA_KEYS
        | {
            "rope.freq_base_swa": "rope_local_base_freq",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        shifted_norms=True,
    ),
    "phi3": Architecture(
        "phi3",
        _LLAMA | {"ffn_up": "mlp.gate_up_proj"},
        {"attention.sliding_window": "sliding_window"},
    ),
    "granite": Architecture(
        "granite",
        _LLAMA,
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        permuted=True,
    ),
    "olmo2": Architecture("olmo2", _ATTENTION | _MLP | _POST_NORMS),
    "smollm3": Architecture("smollm3", _LLAMA, permuted=True),
}
"""By `general.architecture`."""

# Files of Mixtral say that they are of "llama", but have experts.
MIXTRAL = Architecture(
    "mixtral",
    _ATTENTION | _PRE_NORMS | _MIXTRAL,
    {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    permuted=True,
)


def architecture_of(metadata: Mapping[str, object], source: str) -> tuple[str, Architecture]:
    """The name in ``general.architecture``, and what it is.

    Raises
    ------
    ModelLoadError
        It is missing, or no native family answers to it.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{source}: general.architecture {name!r} is not served from GGUF files; "
            f"served are {', '.join(ARCHITECTURES)}"
        )
    if name == "llama" and metadata.get("llama.expert_count") not in (None, 0):
        return name, MIXTRAL
    return name, ARCHITECTURES[name]
