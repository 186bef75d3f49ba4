"""Small random checkpoints in Hugging Face layout, made and saved by transformers itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from src.models import supported_architectures

# Additional fields of transformers' configuration that a tiny model of a family needs.
TINY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 24},
    "gemma3": {"sliding_window": 12, "num_hidden_layers": 7, "query_pre_attn_scalar": 24},
    # Overrides the value in `rope_parameters`.
    "phi3": {"original_max_position_embeddings": 128},
    "deepseekv2": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseekv3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "llama4": {
        "intermediate_size_mlp": 128,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_chunk_size": 24,
        # Every third layer has neither RoPE nor chunks, every second has experts.
        "no_rope_layer_interval": 3,
        "interleave_moe_layer_step": 2,
        "floor_scale": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "cohere2": {"sliding_window": 12, "num_hidden_layers": 5},
    "exaone4": {"sliding_window": 12, "num_hidden_layers": 5},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.8,
        "n_group": 2,
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.375,
        "attention_multiplier": 0.125,
    },
    "granite_moe": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.375,
        "attention_multiplier": 0.125,
    },
    "olmo3": {"sliding_window": 12, "num_hidden_layers": 5},
    "smollm3": {"num_hidden_layers": 5},
    "granite_moehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    },
    "qwen3next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
}
# Family -> class name in transformers, for every supported architecture. An architecture that is
# added to the registry is tested wherever this is used.
CLASSES: dict[str, str] = {
    re.sub(r"(?<=[a-z0-9])(?=Moe|Oss)", "_", name.removesuffix("ForCausalLM")).lower(): name
    for name in supported_architectures()
}

# Scaled so that the 8 frequencies of head_dim 16 cover every band: kept, blended, divided.
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0],
        "original_max_position_embeddings": 128,
    },
}
# Families that rotate a half of each head unless their files say otherwise.
_HALF_ROTATED = ("glm", "glm4", "glm4_moe")
# Families with rope parameters for each kind of layer.
_ROPE_BY_KIND = ("gemma3", "olmo3")
# Families whose configuration in transformers refuses the other variants, and families that rotate
# just as others do, for which a few variants will do.
_ROPES_OF: dict[str, tuple[str, ...]] = {
    "phi3": ("default", "longrope"),
    "cohere": ("default", "llama3"),
    "cohere2": ("default",),
    "deepseekv2": ("default", "yarn"),
    "exaone4": ("default", "llama3"),
    "glm": ("default", "dynamic", "longrope"),
    "glm4": ("default",),
    "glm4_moe": ("default", "yarn"),
    "granite": ("default",),
    "granite_moe": ("default",),
    "granite_moehybrid": ("default",),
    "lfm2": ("default", "yarn"),
    "lfm2_moe": ("default",),
    "olmo3": ("default", "yarn"),
    "qwen2_moe": ("default",),
    "qwen3next": ("default", "yarn"),
    "smollm3": ("default",),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TOKENIZER_TEXT = (
    "Once upon a time there was a small engine that could pull a long train over a high hill.",
    "The quick brown fox jumps over the lazy dog, and 12 plus 30 makes 42.",
    "def add(a, b):\n    return a + b\n",
    '{"name": "Ada", "age": 36, "city": "London"}',
    "Größe, naïveté, 漢字, привет, and a smile 🙂.",
)


def ropes_of(architecture: str) -> tuple[str, ...]:
    """The RoPE variants, keys of `ROPES`, with which an architecture is tested."""
    return _ROPES_OF.get(architecture, tuple(ROPES))


def rope_of(architecture: str, name: str) -> dict[str, Any]:
    """The parameters of a variant; lists of them have an entry for each pair that is rotated."""
    parts = 2 if architecture in _HALF_ROTATED else 1
    return {
        key: value[: len(value) // parts] if isinstance(value, list) else value
        for key, value in ROPES[name].items()
    }


def make_checkpoint(
    directory: Path,
    architecture: str = "llama",
    *,
    rope: str | dict[str, Any] = "default",
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
    vocab_size: int = 320,
    seed: int = 0,
    max_shard_size: str = "5GB",
    tokenizer: bool = False,
    class_name: str | None = None,
    **overrides: Any,
) -> Path:
    """Save a random model of `architecture` (a key of `CLASSES`); returns `directory`.

    `class_name` is a class of transformers with another head, such as one for classification.

    Weights have enough variance (0.15) that greedy choices are clear and attention matters.
    `overrides` are fields of the transformers configuration. `tokenizer` also trains and saves a
    small byte-level BPE tokenizer with a chat template, of at most `vocab_size` entries.
    """
    import transformers

    name = CLASSES[architecture]
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": rope_of(architecture, rope) if isinstance(rope, str) else dict(rope),
        "tie_word_embeddings": tie,
    }
    stem = name.removesuffix("ForCausalLM")
    # For a multimodal class, use the configuration of its text model.
    of_text = getattr(transformers, f"{stem}TextConfig", None)
    config_class = of_text or getattr(transformers, f"{stem}Config")
    if architecture in _ROPE_BY_KIND:
        local = {"rope_type": "default", "rope_theta": 1000.0}
        whole = settings["rope_parameters"]
        settings["rope_parameters"] = {"full_attention": whole, "sliding_attention": local}
    settings.update(TINY.get(architecture, {}))
    settings.update(overrides)
    if isinstance(pattern := settings.get("layer_types"), list):
        count = settings["num_hidden_layers"]
        settings["layer_types"] = (pattern * count)[:count]
    config = config_class(**settings)
    torch.manual_seed(seed)
    model = getattr(transformers, class_name or name)(config).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # transformers initializes norms and biases to constants, which would hide errors.
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.dim() == 1 or parameter_name.endswith("norm.weight"):
                parameter.normal_(1, 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("bias"):
                buffer.normal_(0, 0.1)
    model.config.dtype = dtype
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        save_tokenizer(directory, vocab_size)
    return directory


def load_reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers: eager attention, evaluation mode."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Train and save a byte-level BPE tokenizer; ids 0, 1, 2: pad, message start, message end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TOKENIZER_TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
