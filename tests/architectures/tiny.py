"""Small random checkpoints of transformers' causal language models, encoders and their heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import save_tokenizer

VOCAB_SIZE = 320
# Whatever a configuration calls it. A field is set where the configuration has a value for it.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "model_dim"), 64),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "hidden_size_per_layer_input"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dim_ff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "block_ff_dim"), 96),
    **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("num_global_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "swa_v_head_dim", "kv_channels"), 16),
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), 12),
    "attention_chunk_size": 64,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "encoder_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "initializer_range": 0.15,
}
# Of one model type: fields besides those, or in their place; None leaves one alone.
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
_GLOBAL_HEADS = {"global_head_dim": 32, "num_global_key_value_heads": 1}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4},
    },
    "deepseek_v2": _EXPERTS | {"topk_method": "greedy"},
    "dots1": _EXPERTS,
    "esm": {"vocab_size": VOCAB_SIZE},
    "esmc": {"num_key_value_heads": None},
    "dots3_note": {"text_config": {"per_layer_config": {}}},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4": {"text_config": _GLOBAL_HEADS},
    "gemma4_text": _GLOBAL_HEADS,
    "gemma4_unified_text": _GLOBAL_HEADS,
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
    },
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "qwen4_exp_text": {"ple_embed_dim": 64, "ngram_vocab_size_base": 320},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"layer_types": ["hybrid"] * 4},
}
# Whose checkpoints name a class that transformers has under another name.
CALLED = {"exaone": "ExaoneForCausalLM"}
# Fields that are set where a configuration would work them out, too.
_EVEN_IF_NONE = {"head_dim", "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id"}


def tiny_config(model_type: str, *, is_decoder: bool = True) -> Any:
    """A small configuration of a model type."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    # What the type alone has: the class may serve others, which call themselves otherwise.
    own = EXCEPTIONS.get(model_type, {})
    settings = _settings(kind(), own)
    if "is_decoder" in _fields(kind()):
        settings |= {"is_decoder": is_decoder, "is_encoder_decoder": False}
    return kind(**_merged(settings, own))


def make_tiny(directory: Path, model_type: str) -> Any:
    """Save a random checkpoint and a tokenizer; returns transformers' class of the model."""
    from transformers import AutoModelForCausalLM

    return _saved(directory, model_type, tiny_config(model_type), AutoModelForCausalLM)


def make_tiny_encoder(directory: Path, model_type: str, *, has_head: bool = False) -> Any:
    """The same of an encoder, with a head for masked tokens or without any."""
    from transformers import AutoModel, AutoModelForMaskedLM

    config = tiny_config(model_type, is_decoder=False)
    return _saved(directory, model_type, config, AutoModelForMaskedLM if has_head else AutoModel)


def make_tiny_classifier(
    directory: Path, model_type: str, *, labels: int = 3, of_tokens: bool = False
) -> Any:
    """The same of an encoder with a head for labels of a text, or of its tokens."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    config = tiny_config(model_type, is_decoder=False)
    config.num_labels = labels
    kind = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    return _saved(directory, model_type, config, kind)


def _saved(directory: Path, model_type: str, config: Any, kind: Any) -> Any:
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _draw(name, tensor, is_buffer=name not in dict(model.named_parameters()))
    model.config.dtype = torch.float32
    model.save_pretrained(directory)
    if type(model.config) is not type(config):
        # Of a model that has images too, the configuration of all.
        config.architectures = model.config.architectures
        config.save_pretrained(directory)
    if model_type in CALLED:
        file = directory / "config.json"
        raw = json.loads(file.read_text()) | {"architectures": [CALLED[model_type]]}
        file.write_text(json.dumps(raw))
    save_tokenizer(directory, VOCAB_SIZE)
    return type(model)


def _draw(name: str, tensor: torch.Tensor, *, is_buffer: bool) -> None:
    """Values wide enough that attention matters; norms and biases no constants."""
    if not tensor.is_floating_point():
        return
    if is_buffer:
        # Tables are what they are; the bias of a router is learnt.
        if "bias" in name and "rel" not in name:
            tensor.normal_(0, 0.1)
    elif tensor.dim() > 1:
        tensor.normal_(0, 0.15)
    elif "bias" in name or "sink" in name:
        tensor.normal_(0, 0.1)
    else:
        tensor.mul_(1 + 0.1 * torch.randn_like(tensor))


def _merged(settings: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for key, value in own.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        elif value is not None:
            merged[key] = value
    return merged


def _fields(config: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if not key.startswith("_")}


def _settings(default: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    settings: dict[str, Any] = {}
    names = {**default.attribute_map}
    for key, value in _fields(default).items():
        if key in own and own[key] is None:
            continue
        if isinstance(value, PreTrainedConfig):
            settings[key] = _settings(value, own.get(key, {}))
        elif key in SIZES and (value is not None or key in _EVEN_IF_NONE):
            settings[key] = SIZES[key]
    # Those that a configuration calls otherwise and takes by the usual name.
    for usual, called in names.items():
        if usual in SIZES and called not in SIZES and getattr(default, called, None) is not None:
            settings[called] = SIZES[usual]
    if "qk_rope_head_dim" in _fields(default):
        # Latent attention: as many key heads as queries, and a part of each that is rotated.
        settings["head_dim"] = SIZES["qk_rope_head_dim"]
        settings["num_key_value_heads"] = SIZES["num_attention_heads"]
    kinds = [str(kind) for kind in _fields(default).get("layer_types") or []]
    if kinds and "layer_types" not in own:
        order = list(dict.fromkeys(kinds))
        settings["layer_types"] = [order[i % len(order)] for i in range(4)]
    return settings
