"""What published files of DeepSeek's models say, and what transformers makes of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from src.models import load_config
from src.models.config import ExpertsConfig, LatentAttentionConfig
from src.models.layers.latent_attention import LatentMixerSpec
from tests.support.checkpoints import ROPES

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_file_of_v3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    config = load_config(tmp_path)
    assert config.max_positions == 163840
    assert [isinstance(layer.mlp, ExpertsConfig) for layer in config.layers] == [False] * 3 + (
        [True] * 58
    )
    assert config.unread_layers == 1
    attention = config.layers[0].attention
    assert isinstance(attention, LatentAttentionConfig)
    with torch.device("meta"):
        module = DeepseekV3Attention(DeepseekV3Config(**V3), 0)
    assert attention.scale == pytest.approx(module.scaling)
    spec = LatentMixerSpec(
        attention.num_heads,
        attention.value_dim,
        attention.rank,
        attention.rope_dim,
        torch.bfloat16,
        attention.scale,
        False,
    )
    assert sum(spec.kv().block_bytes(1)) == 1152


@pytest.mark.parametrize("name", [*ROPES, "published"])
def test_scores_are_sharpened_as_in_the_reference(name: str, tmp_path: Path) -> None:
    lists = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 2.0}
    rope = ROPES[name] if name in ROPES else V3["rope_scaling"]
    rope = rope | (lists if name == "longrope" else {}) | {"mscale_all_dim": 0.8}
    fields = V3 | {"rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with torch.device("meta"):
        module = DeepseekV3Attention(DeepseekV3Config(**copy.deepcopy(fields)), 0)
    attention = load_config(tmp_path).layers[0].attention
    assert attention.scale == pytest.approx(module.scaling)
    assert (attention.scale == 192**-0.5) == (name == "default")


def test_layers_with_experts_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3 | {"moe_layer_freq": 2}))
    config = load_config(tmp_path)
    sparse = [n for n, layer in enumerate(config.layers) if isinstance(layer.mlp, ExpertsConfig)]
    assert sparse == list(range(4, 61, 2))


def test_without_experts_every_layer_is_dense(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3 | {"n_routed_experts": None}))
    assert not any(isinstance(layer.mlp, ExpertsConfig) for layer in load_config(tmp_path).layers)
